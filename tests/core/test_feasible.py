"""Which profiles may serve a request, where the figures alone do not say."""

from __future__ import annotations

from typing import Any

import pytest

from controller_cases import FREE_RAW, library, profile
from kvserve_core.errors import ConfigError
from kvserve_core.feasible import Filter, Request, check_chunk, check_context
from kvserve_core.library import LOSSLESS_PROFILE
from kvserve_core.policy import ServiceContext

PERFECT = profile("perfect", 4.0, 1e9, lower=1.0)
UNKNOWN = profile("unknown", 4.0, 1e9, lower=None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bandwidth": 1e-300}, "bandwidth: 1e-300 is out of range; expected from 0.001 to 1e+15 bytes/s"),
        ({"bandwidth": 1e16}, "bandwidth: 1e+16 is out of range; expected from 0.001 to 1e+15 bytes/s"),
        ({"slo_s": 1e16}, "slo_s: 1e+16 is out of range; expected a number of s up to 1e+15"),
        ({"active": -1}, "active: -1 is out of range; expected from 0 to 1099511627776 fetches, or None"),
    ],
)
def test_a_figure_that_cannot_be_is_refused_with_the_range_that_can(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_context(ServiceContext(10**6, **fields))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("bandwidth", [1e-3, 1e15, float("inf"), None])
def test_the_ends_of_the_range_can_be(bandwidth: float | None) -> None:
    check_context(ServiceContext(2**50, bandwidth=bandwidth, slo_s=1e15))


def test_a_size_of_a_chunk_that_is_too_large_is_told_how_large_it_may_be() -> None:
    with pytest.raises(ConfigError, match=r"expected above 0 to 1125899906842624 bytes, or None"):
        check_chunk(1e300)


def test_who_was_not_measured_on_a_workload_says_on_which_it_was() -> None:
    measured = {f"w{i}": PERFECT.quality["default"] for i in range(9)}
    other = PERFECT.model_copy(update={"quality": measured})
    text = Filter(library(other), 0.9).refusal(other, Request("math", None, None, "transfer"))
    assert text is not None
    assert text.startswith("no quality record for workload 'math' (measured: 'w0', 'w1', 'w2', 'w3', 'w4'); profile it")
    text = Filter(library(UNKNOWN), 0.9).refusal(UNKNOWN, Request("math", None, None, "transfer"))
    assert "(measured: none)" in str(text)


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


def test_what_may_lose_something_never_counts_as_exact() -> None:
    filter_ = Filter(library(PERFECT), 0.9)
    assert filter_.quality(LOSSLESS_PROFILE, "default") == 1.0
    quality = filter_.quality(PERFECT, "default")
    assert quality is not None
    assert 1.0 - 1e-9 < quality < 1.0
