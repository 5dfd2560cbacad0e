# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
# Overridable: PYTHON, TORCH (e.g. `make test TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cu130"`),
# VENV, and PYTEST_ARGS.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=

BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint setup

setup: $(READY)

# The stamp is written last, so that an interrupted installation is taken up again by the next call.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/multirate demo

lint: $(READY)
	$(BIN)/ruff check src tests recipes benchmarks
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)
