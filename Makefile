# Two commands do all the set-up: `make quickstart` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: quickstart test check docs clean

quickstart: $(STAMP)
	$(BIN)/hpcjax table jorge/quickstart
	$(BIN)/hpcjax report jorge/quickstart

test: $(STAMP)
	$(BIN)/pytest -n 2 --dist loadfile --cov=hpcjax --cov-report=term:skip-covered --cov-fail-under=90 --jaxtyping-packages=hpcjax,beartype.beartype

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

docs: $(STAMP)
	$(BIN)/python docs/build.py
	$(BIN)/mkdocs build --strict

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "hpcjax needs Python 3.11 or newer: set PYTHON=..."'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,docs]'
	touch $@

clean:
	rm -rf $(VENV) .cache build dist site
