# Everything goes through .venv; each target works from an empty cache and is fast the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-$(shell cat pyproject.toml constraints.txt Makefile | cksum | cut -d' ' -f1)

.PHONY: setup serve check test format lint clean

setup: $(STAMP)

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "splittime needs Python 3.11 or later; '$(PYTHON)' is $$($(PYTHON) -V). Try: make PYTHON=python3.12 setup"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "No venv module: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --editable '.[dev,plots]'
	@rm -f $(VENV)/.setup-*
	@touch $@

serve: setup
	$(BIN)/splittime serve $(ARGS)

check: setup lint test

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: setup
	$(BIN)/python -m pytest $(ARGS)

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
