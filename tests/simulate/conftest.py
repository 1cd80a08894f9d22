from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from benchmark_modules import benchmark


@pytest.fixture(scope="module")
def controller() -> Iterator[ModuleType]:
    """``benchmarks/controller.py``."""
    with benchmark("controller") as (module,):
        yield module
