# Everything on a machine that has python3 (with venv) and make. `make help` lists the targets.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   ?= .venv
ARGS   ?=
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: help tune test lint types bench bench-quick clean

help:           ## this list
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 16

# torch goes first, exactly: a bare "torch" as another package's dependency would fetch gigabytes.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $@

tune: $(READY)  ## set up, then: autobatch tune --target 256 $(ARGS)
	$(BIN)/autobatch tune --target 256 $(ARGS)

test: $(READY)  ## set up, then run the tests: pytest $(ARGS)
	$(BIN)/python -m pytest $(ARGS)

lint: $(READY)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY) ## mypy, strict
	$(BIN)/mypy

bench: $(READY) ## all benchmarks, each against its bar (about 20 minutes)
	$(BIN)/python benchmarks/probe_cost.py --check
	$(BIN)/python benchmarks/search_quality.py --check
	$(BIN)/python benchmarks/brute_force.py --check

bench-quick: $(READY) ## the same benchmarks, about a minute each
	$(BIN)/python benchmarks/probe_cost.py --quick --check
	$(BIN)/python benchmarks/search_quality.py --quick --check
	$(BIN)/python benchmarks/brute_force.py --quick --check

clean:          ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
