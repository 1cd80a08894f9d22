"""These tests run in SGLang's own environment: ``make test-sglang``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from leaving import pytest_sessionfinish, pytest_unconfigure  # noqa: F401  # hooks of this conftest

os.environ.update(SGLANG_USE_CPU_ENGINE="1", SGLANG_HOST_IP="127.0.0.1", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")


def pytest_configure(config: pytest.Config) -> None:
    """The engine's own imports warn of what they find on a CPU, and its bootstrap server ends without its tasks; our
    code is held to no warning at all."""
    for line in (
        r"ignore::DeprecationWarning:torch\..*",
        r"ignore::DeprecationWarning:importlib\._bootstrap",
        r"ignore::UserWarning:sglang\..*",
        r"ignore::DeprecationWarning:sglang\..*",
        r"ignore:unclosed.*:ResourceWarning",
    ):
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from sgl_models import make_llama

    return make_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def expected(model: Path, logs: Path) -> list[tuple[list[int], list[float]]]:
    """Tokens and logprobs of one aggregated server for each of ``servers.PROMPTS``; it is gone afterwards."""
    import servers

    alone = servers.start(model, logs, "alone", servers.free_port(), "--disable-overlap-schedule")
    try:
        alone.wait()
        found = [servers.generate(alone, text) for text in servers.PROMPTS]
    finally:
        alone.kill()
    assert all(len(set(tokens)) > 10 for tokens, _ in found), "the model's tokens are degenerate"
    return found
