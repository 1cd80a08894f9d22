"""What ``benchmarks/quality_positions.py`` makes of KL by token."""

from __future__ import annotations

from math import exp

import pytest

from benchmark_modules import benchmark


def test_quality_by_fed_tokens_and_kl_by_stretch() -> None:
    with benchmark("quality_positions") as (positions,):
        near, far = [0.1] * 96, [0.02] * 96
        rows = [positions.Seen("p", "klt", f"t{i}", cr, near + far) for i, cr in enumerate((4.0, 12.0))]
        rows.append(positions.Seen("other", "klt", "t0", 5.0, far + far))
        found = positions.table(rows)["klt"]
    assert found["p"]["cr"] == 6.0  # original over wire bytes of prompts of equal length
    assert found["p"]["quality"]["96"] == pytest.approx([exp(-0.1)] * 3, abs=1e-5)
    assert found["p"]["quality"]["192"] == pytest.approx([exp(-0.06)] * 3, abs=1e-5)
    assert found["p"]["kl"]["0-8"] == 0.1
    assert found["p"]["kl"]["144-192"] == 0.02
    assert found["other"]["kl"]["0-8"] == 0.02
