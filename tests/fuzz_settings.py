"""How many cases the fuzz tests run: ``KVSERVE_FUZZ=50`` runs 50 times as many, fresh ones each time."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

FACTOR = int(os.environ.get("KVSERVE_FUZZ", "1"))


def fuzz(cases: int) -> settings:
    """Settings for one fuzz test: reproducible unless run for longer."""
    return settings(
        max_examples=cases * FACTOR,
        derandomize=FACTOR == 1,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
