"""The clairvoyant: what it knows, and that nobody beats it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvserve_core.component import ComponentConfig
from kvserve_core.policy import Candidate, Choice, Policy, ServiceContext
from kvserve_core.simulate.run import play_seed
from kvserve_plugins.policies.analytic import Analytic
from kvserve_plugins.policies.static import Static
from simulated_worlds import EXACT, library, made

NAMES = ["raw", "lossless", "fast", "small", "poor"]


class Slowest(Policy):
    """The worst of what is offered."""

    def __init__(self) -> None:
        super().__init__(ComponentConfig())

    def choose(self, context: ServiceContext, candidates: Sequence[Candidate]) -> Choice:
        return Choice(len(candidates) - 1, "slowest")


def analytic() -> Analytic:
    return Analytic(Analytic.Config())


def test_with_nothing_hidden_the_model_is_clairvoyant() -> None:
    link = {"bandwidth": "16Gbps", "shared": False, "overhead": 0}
    world = made(library(), requests=300, links=[link], prior_bandwidth="16Gbps", **EXACT)
    run, hindsight = play_seed(world, analytic(), 0)
    assert list(run.truth.index) == NAMES
    spent = np.asarray(run.encode_s) + np.asarray(run.transfer_s) + np.asarray(run.decode_s)
    assert hindsight.chosen_s == pytest.approx(spent)
    assert hindsight.regret() == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("policy", [Slowest(), Static(Static.Config(profile="lossless")), analytic()])
def test_nobody_beats_it(policy: Policy) -> None:
    world = made(library(), requests=500, rate=20, speeds={"bias": 0.5})
    _, hindsight = play_seed(world, policy, 3)
    assert (hindsight.chosen_s >= hindsight.best_s - 1e-12).all()
    assert 0 <= hindsight.regret() <= hindsight.regret(model=False)
    assert (policy.__class__ is Analytic) == (hindsight.regret(model=False) < 0.05)


def test_it_knows_drift_and_bias_and_a_bandwidth_that_changes_on_the_way(tmp_path: Any) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("time_s,bandwidth\n0,80Gbps\n0.5,1Gbps\n")
    fields = {"links": [{"trace": trace, "shared": False}], "engine": EXACT["engine"]}
    speeds = {"bias": 0.5, "drift": 0.3, "noise": 0, "ratio_noise": 0}
    world = made(library(), requests=300, speeds=speeds, **fields)
    for name in ("fast", "small"):
        run, hindsight = play_seed(world, Static(Static.Config(profile=name)), 1)
        spent = np.asarray(run.encode_s) + np.asarray(run.transfer_s) + np.asarray(run.decode_s)
        assert hindsight.all_s[:, NAMES.index(name)] == pytest.approx(spent)


def test_a_profile_that_may_not_serve_is_no_choice() -> None:
    tenants = [{"name": "strict"}, {"name": "lax", "min_quality": 0.4}]
    run, hindsight = play_seed(made(library(), requests=200, tenants=tenants), analytic(), 0)
    strict = np.asarray(run.requests.tenant) == 0
    poor = hindsight.all_s[:, NAMES.index("poor")]
    assert np.isinf(poor[strict]).all()
    assert np.isfinite(poor[~strict]).all()
    assert np.isfinite(hindsight.best_s).all()
