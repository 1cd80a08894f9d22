"""How ``benchmarks/gpu_breakeven.py`` finds both break-evens; with sessions that do as the model says."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from types import ModuleType

import numpy as np
import pytest

from benchmark_modules import benchmark
from kvserve_core.latency import Speed, latency_line, threshold
from kvserve_core.overlap import Form

KIB, TOKENS = 56, (1024, 8192, 32768)
STAGES = {"raw": (1.0, Speed(0.001, 4e-12), Speed(0.002, 5e-12)), "p": (6.0, Speed(0.002, 9e-12), Speed(0.003, 8e-12))}


@pytest.fixture(scope="module")
def model_of() -> Iterator[ModuleType]:
    with benchmark("breakeven_model") as (module,):
        yield module


def seconds(form: Form, profile: str, tokens: int, rate: float) -> float:
    ratio, encode, decode = STAGES[profile]
    nbytes = KIB * 1024 * tokens
    return form.seconds(encode.seconds(nbytes), nbytes / ratio / rate, decode.seconds(nbytes), nbytes)


def learned(model_of: ModuleType, form: Form) -> object:
    model = model_of.Model(form)
    for profile, (ratio, encode, _) in STAGES.items():
        for tokens in TOKENS:
            nbytes = KIB * 1024 * tokens
            total = seconds(form, profile, tokens, inf)
            model.learn(profile, tokens, model_of.Stamps(total, encode.seconds(nbytes), int(nbytes / ratio), nbytes))
    return model


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("chunk", [112 * 2**20, None])
def test_sessions_as_the_model_says_break_even_where_it_says(
    model_of: ModuleType, tokens: int, chunk: float | None
) -> None:
    form = Form(chunk)
    model = learned(model_of, form)
    at = model.break_even("p", tokens)
    assert seconds(form, "p", tokens, at) == pytest.approx(seconds(form, "raw", tokens, at), rel=1e-3)
    rates = [float(r) for r in np.geomspace(at / 2.5, at * 2.5, 9)]
    taken = {name: [[seconds(form, name, tokens, r)] * 3 for r in rates] for name in STAGES}
    case = model_of.judged(model, "p", tokens, {"rates": rates, "taken": taken})
    assert case["model"]["off"] < 0.05
    assert case["model"]["seconds_off"] < 1e-3


def test_one_after_another_it_is_theorem_6_1(model_of: ModuleType) -> None:
    nbytes = KIB * 1024 * 8192
    raw, ours = (latency_line(nbytes, *STAGES[name]) for name in ("raw", "p"))
    assert learned(model_of, Form()).break_even("p", 8192) == pytest.approx(threshold(ours, raw), rel=1e-3)


def test_a_noisy_point_does_not_move_the_crossing_far(model_of: ModuleType) -> None:
    rates = [1e9 * 1.3**i for i in range(9)]
    raw = [0.010 + 4e6 / r for r in rates]
    ours = [0.012 + 1e6 / r for r in rates]
    assert model_of.crossing(rates, ours, raw) == pytest.approx(1.5e9)
    ours[0] += 0.002
    assert model_of.crossing(rates, ours, raw) == pytest.approx(1.5e9, rel=0.4)


def test_what_never_crosses_is_neither_miss_nor_pass_by_itself(model_of: ModuleType) -> None:
    rates = [1e9, 2e9, 4e9]
    assert model_of.crossing(rates, [1.0] * 3, [2.0] * 3) == inf
    assert model_of.crossing(rates, [2.0] * 3, [1.0] * 3) == 0.0
    assert (model_of._off(None, None), model_of._off(100.0, None), model_of._off(None, 100.0)) == (0.0, 1.0, 1.0)
