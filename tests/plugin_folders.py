"""Fake plugins: real packages with hand-made metadata, each in a folder of its own below ``fake_plugins``."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, distributions
from pathlib import Path

import pytest

from kvserve_core.plugins import ENTRY_POINT_GROUP, Loaded, load_plugins

FOLDER = Path(__file__).parent / "fake_plugins"
BUILT_INS = [
    EntryPoint(name, f"kvserve_plugins.{name}", ENTRY_POINT_GROUP)
    for name in ("transforms", "quantizers", "codecs", "transports", "policies", "evaluators", "workloads")
]


def points(*names: str) -> list[EntryPoint]:
    """The entry points of these fake plugins, with their distributions."""
    found = distributions(path=[str(FOLDER / name) for name in names])
    return [point for dist in found for point in dist.entry_points.select(group=ENTRY_POINT_GROUP)]


class Fakes:
    """Puts fake plugins on the path for one test, and forgets their modules before and after."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        forget()

    def load(self, *names: str, built_ins: bool = False, disabled: str = "") -> Loaded:
        """Load these plugins, after the built-ins if asked for."""
        for name in names:
            self._patch.syspath_prepend(str(FOLDER / name))
        found = [*points(*names), *(BUILT_INS if built_ins else [])]
        return load_plugins(found, {"KVSERVE_DISABLED_PLUGINS": disabled})


def forget() -> None:
    """Drop the fake plugins' modules."""
    for module in [m for m in sys.modules if m.startswith("acme_")]:
        del sys.modules[module]
