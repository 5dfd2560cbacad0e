#!/usr/bin/env bash
# The kernel's own tests on Arm, emulated: builds the kernel with Debian's cross compiler and runs
# tests/csrc with an Arm Python. No speed can be learnt from it, and it takes an hour.
#
#   apt-get install gcc-aarch64-linux-gnu qemu-user
#   dpkg --add-architecture arm64 && apt-get update
#   make test-arm
#
# What it downloads (130 MB) and builds stays in build/arm.
set -euo pipefail
cd "$(dirname "$0")/.."
ROOT=$PWD/build/arm PYTHON=${PYTHON:-.venv/bin/python}
# Of Debian 12, whose Python is 3.11.
PACKAGES="python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libc6 libstdc++6 libgcc-s1 zlib1g libexpat1
    libssl3 libffi8 libbz2-1.0 liblzma5 libsqlite3-0 libuuid1 libncursesw6 libtinfo6 libreadline8 libgomp1 libcrypt1
    libdb5.3 libnsl2 libtirpc3"
# The last torch whose Arm wheel is for the CPU alone. It asks for CUDA's libraries all the same, so it comes without
# what it asks for, as accelerate does, which asks for it.
ALONE="torch==2.9.1 accelerate"
WHEELS="transformers safetensors tokenizers numpy psutil cffi filelock gguf typer rich pytest hypothesis sympy networkx
    jinja2 fsspec"

if [ ! -e "$ROOT/.ready" ]; then
    rm -rf "$ROOT"
    mkdir -p "$ROOT/debs" "$ROOT/wheels" "$ROOT/site"
    # shellcheck disable=SC2086
    (cd "$ROOT/debs" && apt-get download -q $(printf '%s:arm64 ' $PACKAGES))
    for file in "$ROOT"/debs/*.deb; do dpkg -x "$file" "$ROOT/root"; done
    download() {
        $PYTHON -m pip download -q -d "$ROOT/wheels" --only-binary=:all: --python-version 3.11 --implementation cp \
            --abi cp311 --abi abi3 --abi none --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 \
            --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 --platform any "$@"
    }
    # shellcheck disable=SC2086
    download --no-deps $ALONE
    # shellcheck disable=SC2086
    download $WHEELS
    for file in "$ROOT"/wheels/*.whl; do $PYTHON -m zipfile -e "$file" "$ROOT/site"; done
    touch "$ROOT/.ready"
fi
exec qemu-aarch64 -L "$ROOT/root" -E PYTHONPATH="$PWD/src:$ROOT/site" -E OMP_NUM_THREADS=1 \
    -E CC=aarch64-linux-gnu-gcc -E MULTIRATE_CACHE="$ROOT/cache" "$ROOT/root/usr/bin/python3.11" -m pytest \
    -p no:cacheprovider "${@:-tests/csrc}"
