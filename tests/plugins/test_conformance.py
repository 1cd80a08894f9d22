"""Every built-in component passes the conformance kit that third parties get."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvserve_core.registry import default_registry, unavailable
from kvserve_core.testing import checks_for, result
from plugins.conformance_cases import GOLDEN, SETUPS, Row, built_ins, rows, subject


@pytest.mark.parametrize("row", rows(), ids=lambda r: f"{r.kind}-{r.name}-{r.index}")
def test_a_built_in_conforms(row: Row, tmp_path: Path) -> None:
    if reason := unavailable(default_registry().manifest(row.kind, row.name).component):
        pytest.skip(reason)
    on = subject(row, tmp_path / "store")
    results = [result(each, on) for each in checks_for(on)]
    failures = [f"{r.check}: {r.detail}" for r in results if r.status == "failed"]
    assert not failures, "\n".join(failures)
    if skipped := {r.detail for r in results if r.status == "skipped"}:
        pytest.skip("; ".join(sorted(skipped)))


def test_every_setup_is_of_a_component_that_exists() -> None:
    assert set(SETUPS) <= set(built_ins())


def test_every_golden_frame_is_of_a_component_that_exists() -> None:
    names = {f"{kind}-{name}" for kind, name in built_ins()}
    assert {p.name.partition("@")[0] for p in GOLDEN.glob("*.kv")} <= names


def test_golden_frames_are_small() -> None:
    assert max(p.stat().st_size for p in GOLDEN.iterdir()) < 100_000
