"""Measuring candidates on a tiny model."""

from __future__ import annotations

import pickle

import pytest

from kvserve_core.component import ComponentSpec
from kvserve_core.errors import ConfigError, KVServeError
from kvserve_core.evaluation.engine import Roundtrip
from kvserve_core.evaluation.quality import Interval
from kvserve_core.evaluator import Evaluation, Prepared, Share
from kvserve_core.profiling.executor import Processes
from kvserve_core.profiling.work import MEASURE
from kvserve_hf.profile.judge import harshest, judged
from kvserve_hf.profile.objective import CPU_S
from kvserve_plugins.evaluators.continuation import Continuation
from tiny_profile import objective, setup, uniform


def test_a_finer_pipeline_is_better_and_larger() -> None:
    asked = objective()
    coarse, fine = asked.measure([uniform(4, layer_block=3), uniform(64, layer_block=3)])
    assert coarse.quality < fine.quality <= 1.0
    assert coarse.cr > fine.cr > 1.0
    assert coarse.quality_low <= coarse.quality <= coarse.quality_high
    assert (coarse.samples, coarse.key) == (4, uniform(4, layer_block=3).key)
    assert coarse.seconds > 0
    assert coarse.metrics[CPU_S][0] > 0
    assert coarse.encode.seconds(1e6) > 0  # fixed cost or slope: which of the two depends on the noise of timings
    assert coarse.metrics["continuation.samples@code"] == (2, 2, 2)
    asked.close()
    assert asked.engine.held == ("profile",)


def test_the_evaluators_prompts_can_serve_as_timings() -> None:
    asked = objective(lengths=(16,), reuse=True)  # a line needs a second length: that of the prompts
    (found,) = asked.measure([uniform(16, layer_block=3)])
    assert found.error == ""
    assert found.encode.seconds(1e6) > 0
    asked.close()


def test_estimates_are_near_to_full_frames_and_keep_their_order() -> None:
    asked = objective()
    points = [uniform(levels, codec, layer_block=3) for levels in (4, 16, 64) for codec in ("bitpack", "zstd")]
    measured = [next(iter(asked.measure([p]))) for p in points]
    asked.close()
    assert [m.cr_estimate for m in measured] == [asked.estimate(p) for p in points]
    order = sorted(range(len(points)), key=lambda i: measured[i].cr)
    assert order[0] in (4, 5)
    assert order[-1] in (0, 1)
    # The header of a frame is a large part of 60 tokens of a tiny model; its size is what differs.
    assert all(0.5 < m.cr_estimate / m.cr < 1.2 for m in measured)


def test_protected_layers_count_in_full() -> None:
    asked = objective()
    plain, held = (asked.estimate(uniform(4, layer_block=1, **more)) for more in ({}, {"raw_layers": [0, 1]}))
    assert held < plain
    asked.close()


def test_what_the_model_refuses_is_an_answer_and_not_the_end() -> None:
    asked, wrong = objective(), uniform(4, raw_layers=[40])
    (found,) = asked.measure([wrong])
    assert "layer 40" in found.error
    assert found.key == wrong.key
    with pytest.raises(KVServeError, match="layer 40"):
        asked.estimate(wrong)
    asked.close()


def test_it_travels_to_worker_processes_and_says_the_same_there() -> None:
    here = objective()
    again = pickle.loads(pickle.dumps(here))
    assert again.setup == here.setup
    point = uniform(16, layer_block=3)
    (mine,) = here.measure([point])
    with Processes(objective(), 1) as workers:
        ((_, theirs),) = workers.run(MEASURE, [point])
    assert (theirs.error, theirs.cr, theirs.metrics["continuation.kl"]) == (
        "",
        mine.cr,
        mine.metrics["continuation.kl"],
    )
    here.close()


def test_the_evaluator_that_proves_most_decides() -> None:
    sure, few = Interval(0.985, 0.98, 0.99), Interval(1.0, 0.7, 1.0)
    assert harshest({"continuation": sure, "passkey": few}) == sure
    broken = Interval(0.2, 0.1, 0.4)
    assert harshest({"continuation": sure, "passkey": broken}) == broken


def test_figures_are_named_after_their_evaluator_and_have_no_infinity() -> None:
    inf = float("inf")
    kl = Interval(0.01, -inf, inf)
    found = Evaluation(Interval(0.99, 0.0, 1.0), 1, {"kl": kl}, {"code": Share(Interval(0.99, 0.9, 1.0), 1)})
    quality, metrics = judged({"continuation": found})
    assert quality == found.quality
    assert metrics["continuation.kl"] == (0.01, -1e9, 1e9)
    assert metrics["continuation.quality@code"] == (0.99, 0.9, 1.0)


@pytest.mark.parametrize("said", [Interval(float("nan"), 0.0, 1.0), Interval(1.7, 0.0, 2.0), Interval(0.5, -0.1, 1.0)])
def test_an_evaluator_that_says_a_quality_that_is_none_is_refused(said: Interval) -> None:
    with pytest.raises(ConfigError, match=r"evaluators\.mine: says a quality of"):
        judged({"mine": Evaluation(said, 3)})
    with pytest.raises(ConfigError, match=r"evaluators\.mine"):
        judged({"mine": Evaluation(Interval(0.9, 0.8, 1.0), 3, by_kind={"code": Share(said, 1)})})


def test_an_evaluator_is_named_once() -> None:
    spec = ComponentSpec(name="continuation")
    with pytest.raises(ConfigError, match="'continuation' is named twice"):
        objective(evaluators=(spec, spec))


def test_when_an_evaluator_refuses_those_before_it_hold_nothing() -> None:
    passkeys = ComponentSpec(name="passkey")  # a random model answers none of them
    asked = objective(evaluators=(*setup().evaluators, passkeys))
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"passkey|answers"):
            list(asked.measure([uniform(16, layer_block=3)]))
        assert asked.engine.held == ("profile",)
    asked.close()


class Idle(Prepared):
    def run(self, roundtrip: Roundtrip) -> Evaluation:
        return Evaluation(Interval(1.0, 1.0, 1.0), 1)


def test_evaluators_that_send_nothing_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Continuation, "prepare", lambda *_: Idle())
    asked = objective()
    (found,) = asked.measure([uniform(16, layer_block=3)])
    asked.close()
    assert "evaluators.continuation: sent no prompt" in found.error
