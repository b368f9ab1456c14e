# Two commands do all the set-up: `make quickstart` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# What a run needs, and what working on the project needs besides.
BASE := $(VENV)/.base
DEV := $(VENV)/.dev

.PHONY: quickstart test test-all coverage check kernels oracles docs clean

quickstart: $(BASE)
	$(BIN)/hpcjax table jorge/quickstart --parallel 2
	$(BIN)/hpcjax report jorge/quickstart

# A worker that dies ends the suite: with the other alone it would take twice as long.
PYTEST := $(BIN)/pytest -n 2 --dist loadfile --max-worker-restart 0
test: $(DEV)
	$(PYTEST)

# The slow tests too; types are checked wherever shapes are stated.
test-all: $(DEV)
	HPCJAX_CHECK_TYPES=1 $(PYTEST) -m 'not gpu'

# All tests; fails if they run less than 90 % of the lines.
coverage: $(DEV)
	$(PYTEST) -m 'not gpu' --cov=hpcjax --cov-report=term:skip-covered --cov-fail-under=90

check: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

# Enough to interpret kernels and to compile them for GPUs that are not there: half a
# minute, 1 GB. The plugin's own requirements are CUDA; to lower for it, none is needed.
kernels: $(DEV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt jax-triton triton
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps jax-cuda13-plugin
	$(BIN)/python -c 'import jax_triton'

# Without, tests that compare with PyTorch are skipped.
oracles: kernels
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[oracles]'

docs: $(DEV)
	$(BIN)/python docs/build.py
	$(BIN)/zensical build --strict --config-file build/mkdocs.yml

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

# What a GPU machine without a network lacks, if its image has JAX, flax and CUDA for
# Python 3.12: a few MB that travel with the checkout. docs/gpu.md says how.
CARRIED := array-record beartype docstring-parser grain h5netcdf jax-triton==0.3.1 \
	platformdirs portpicker typeguard tyro
.wheels: Makefile $(BASE)
	$(BIN)/python -m pip download --quiet --no-deps --only-binary=:all: --dest $@ \
	  --python-version 3.12 --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 \
	  $(CARRIED)
	touch $@

clean:
	rm -rf $(VENV) .cache .wheels build dist
