"""Engines shared by the tests of a module. Starting one takes ten seconds and more; at most four live at once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from vllm_engines import EngineProcess, Setup
from vllm_models import MODELS, VOCAB, save
from vllm_pairs import Pair

LENGTHS = (5, 33, 64, 129, 200, 257, 700, 1500)
"""Prompts below a block, on block and cell boundaries, over several cells and windows."""


def pytest_configure(config: pytest.Config) -> None:
    """The engine's own imports warn of what is deprecated in torch; our code is held to no warning at all."""
    for line in (r"ignore::DeprecationWarning:torch\..*", r"ignore::FutureWarning:vllm\..*"):
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models by name."""
    root = tmp_path_factory.mktemp("models")
    return {name: save(name, root) for name in MODELS}


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Eight random prompts."""
    source = random.Random(11)
    return [[source.randrange(3, VOCAB) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., EngineProcess]]:
    """Engines that end with the module; the same set-up is started once."""
    engines: dict[str, EngineProcess] = {}

    def engine(model: Path, role: str | None, **options: Any) -> EngineProcess:
        setup = Setup(model, role, **options)
        key = repr(setup)
        if key not in engines:
            engines[key] = EngineProcess(setup)
        return engines[key]

    yield engine
    for running in engines.values():
        running.close()


@pytest.fixture
def engine_pair(folders: dict[str, Path]) -> Iterator[Callable[..., Pair]]:
    """Two engines for one test."""
    engines: list[EngineProcess] = []

    def pair(
        model: str,
        extra: Mapping[str, Any],
        llm: Mapping[str, Any],
        beside: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Pair:
        for role, given in (("kv_producer", {}), ("kv_consumer", extra)):
            others = (beside[role],) if beside else ()
            engines.append(EngineProcess(Setup(folders[model], role, given, llm=llm, beside=others)))
        return Pair(*engines)

    yield pair
    for engine in engines:
        engine.close()
