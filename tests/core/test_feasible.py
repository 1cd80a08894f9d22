"""Which profiles may serve a request, where the figures alone do not say."""

from __future__ import annotations

import pytest

from controller_cases import FREE_RAW, library, profile
from kvserve_core.feasible import Filter, Request
from kvserve_core.library import LOSSLESS_PROFILE

PERFECT = profile("perfect", 4.0, 1e9, lower=1.0)
UNKNOWN = profile("unknown", 4.0, 1e9, lower=None)


def refusal(name: str, default: float, asked: float | None, intent: str = "transfer") -> str | None:
    profiles = {p.name: p for p in (FREE_RAW, LOSSLESS_PROFILE, PERFECT, UNKNOWN)}
    rules = Filter(library(*profiles.values()), default, allow_unprofiled={"unknown"})
    return rules.refusal(profiles[name], Request("default", asked, None, intent))


@pytest.mark.parametrize("name", ["perfect", "unknown"])
@pytest.mark.parametrize("intent", ["transfer", "store"])
@pytest.mark.parametrize(("default", "asked"), [(1.0, None), (0.9, 1.0), (0.9, 1)])
def test_a_floor_of_1_is_met_by_exact_profiles_alone(name: str, intent: str, default: float, asked: float) -> None:
    assert refusal("raw", default, asked, intent) is None
    assert refusal("lossless", default, asked, intent) is None
    assert "a floor of 1 asks for exact KV" in str(refusal(name, default, asked, intent))


@pytest.mark.parametrize("name", ["perfect", "unknown"])
def test_below_it_what_was_measured_counts(name: str) -> None:
    assert refusal(name, 1.0, 0.9999) is None
    assert refusal(name, 0.99, None) is None
