"""Modules of ``benchmarks/``, which lie on no path but a script's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@contextmanager
def benchmark(*names: str) -> Iterator[list[ModuleType]]:
    """These, imported; what they import later is found as long as this lasts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield [import_module(name) for name in names]
