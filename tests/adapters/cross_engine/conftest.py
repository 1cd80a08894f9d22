"""These tests run in SGLang's environment and start vLLM in its own: ``make test-cross-engine``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "sglang"))
sys.path.insert(0, str(Path(__file__).parent))

from leaving import pytest_sessionfinish, pytest_unconfigure  # noqa: F401  # hooks of this conftest

os.environ.update(SGLANG_USE_CPU_ENGINE="1", SGLANG_HOST_IP="127.0.0.1", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")


def pytest_configure(config: pytest.Config) -> None:
    """SGLang's own imports warn of what is deprecated and of GPUs that are not here; our code may not warn at all."""
    deprecated = r"ignore::DeprecationWarning:torch\..*", "ignore:builtin type .*:DeprecationWarning"
    for line in (*deprecated, "ignore:Only CUDA:UserWarning"):
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from sgl_models import make_llama

    return make_llama(tmp_path_factory.mktemp("models") / "tiny-llama")
