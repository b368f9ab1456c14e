# Two commands do all the set-up: `make quickstart` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# What a run needs, and what working on the project needs besides.
BASE := $(VENV)/.base
DEV := $(VENV)/.dev

.PHONY: quickstart test check oracles docs clean

quickstart: $(BASE)
	$(BIN)/hpcjax table jorge/quickstart
	$(BIN)/hpcjax report jorge/quickstart

test: $(DEV)
	$(BIN)/pytest -n 2 --dist loadfile --cov=hpcjax --cov-report=term:skip-covered --cov-fail-under=90

check: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

# Tests that compare with PyTorch are skipped without it.
oracles: $(DEV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[oracles]'

docs: $(DEV)
	$(BIN)/python docs/build.py
	$(BIN)/mkdocs build --strict

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "hpcjax needs Python 3.11 or newer: set PYTHON=..."'
	$(PYTHON) -m venv $(VENV)

$(BASE): pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(DEV): pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,docs]'
	touch $@ $(BASE)

# Peers that need another JAX than ours, each in an environment of its own; only the
# tables that compare with them want these.
.cache/peers/kfac-jax: .cache/peers/kfac-jax/.installed
.cache/peers/%/.installed: experiments/kaisa/peers/%.txt
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --requirement $<
	touch $@

clean:
	rm -rf $(VENV) .cache build dist site
