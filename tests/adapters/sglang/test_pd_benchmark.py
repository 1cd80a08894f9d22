"""How ``benchmarks/sglang_pd.py`` judges what it measured; without a server."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from benchmark_modules import benchmark


@pytest.fixture(scope="module")
def sglang_pd() -> Iterator[ModuleType]:
    with benchmark("sglang_pd") as (module,):
        yield module


def judged(sglang_pd: ModuleType, **wire_bytes: int) -> dict[str, Any]:
    """A report over one round of ways that took so many bytes each and a second."""
    from sglang_serving.client import Timed

    rounds = {way: [Timed(900, 1.0, nbytes)] for way, nbytes in wire_bytes.items()}
    given = argparse.Namespace(ways=list(rounds), mbps=100.0, rounds=1)
    found: dict[str, Any] = sglang_pd.report(given, {}, rounds)
    return found


def test_all_bars_are_judged_beside_mooncake(sglang_pd: ModuleType) -> None:
    found = judged(sglang_pd, kvserve=30, exact=70, raw=100, mooncake=100)
    assert [bar["value"] for bar in found["bars"]] == [0.3, 0.7, 1.0]
    assert (found["ok"], found["not_judged"]) == (True, [])


def test_a_bar_that_does_not_hold_fails(sglang_pd: ModuleType) -> None:
    assert not judged(sglang_pd, kvserve=50, exact=70, mooncake=100)["ok"]


def test_without_mooncake_nothing_is_judged_which_is_said_and_is_no_failure(sglang_pd: ModuleType) -> None:
    found = judged(sglang_pd, kvserve=30, exact=70, raw=100)
    assert (found["ok"], found["bars"]) == (True, [])
    assert found["not_judged"] == [name for name, *_ in sglang_pd.WANTED]


def test_a_way_that_was_left_out_leaves_the_others_to_be_judged(sglang_pd: ModuleType) -> None:
    found = judged(sglang_pd, exact=90, mooncake=100)
    assert [bar["ok"] for bar in found["bars"]] == [False]
    assert len(found["not_judged"]) == 2
    assert not found["ok"]
