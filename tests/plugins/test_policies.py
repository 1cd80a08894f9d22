"""The built-in policies, through the controller that drives them."""

from __future__ import annotations

import importlib

import pytest
from pydantic import ValidationError

from kvserve_core.component import Component
from kvserve_core.controller import Controller
from kvserve_core.latency import Speed
from kvserve_core.library import Profile, ProfileLibrary, QualityRecord, built_in
from kvserve_core.policy import Candidate, Policy, ServiceContext
from kvserve_core.profile import RAW_CHAIN, PipelineSpec
from kvserve_core.registry import summary_of
from kvserve_plugins.policies import kvserve_policies
from kvserve_plugins.policies.analytic import Analytic
from kvserve_plugins.policies.static import Static

CONTEXT = ServiceContext(nbytes=10**8, bandwidth=1e9)
MANIFESTS = list(kvserve_policies())


def candidates(*names: str) -> list[Candidate]:
    return [Candidate(name, 2.0, float(i), 0.0, 0.0, 0.0) for i, name in enumerate(names)]


def library(lower: float = 1.0) -> ProfileLibrary:
    record = QualityRecord(value=1, lower=lower, upper=1, metric="m", samples=3)
    slow = Profile(
        name="slow",
        pipeline=PipelineSpec(planes={"*": RAW_CHAIN}),
        cr=2.0,
        encode=Speed.of(1e6),
        decode=Speed.of(1e6),
        quality={"default": record},
    )
    raw = built_in("raw", 1.0, Speed(), Speed())
    return ProfileLibrary(model_id="m", fingerprint="f", device="d", created="now", profiles=(raw, slow))


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda m: m.name)
def test_a_manifest_says_what_its_class_says(manifest: Component) -> None:
    module, _, name = manifest.target.partition(":")
    cls = getattr(importlib.import_module(module), name)
    assert issubclass(cls, Policy)
    assert summary_of(cls) == manifest.summary
    assert len(manifest.summary) <= 90


def test_the_built_in_policies() -> None:
    assert [m.name for m in MANIFESTS] == ["analytic", "bandit", "static"]


def test_analytic_takes_the_fastest() -> None:
    choice = Analytic(Analytic.Config()).choose(CONTEXT, candidates("a", "b", "raw"))
    assert (choice.index, choice.reason) == (0, "fastest")


def test_static_takes_its_profile_wherever_it_stands() -> None:
    policy = Static(Static.Config(profile="b"))
    assert policy.choose(CONTEXT, candidates("raw", "a", "b")).index == 2
    assert policy.choose(CONTEXT, candidates("a", "raw")).index == 1
    assert policy.choose(CONTEXT, candidates("a", "raw")).reason == "b is not feasible"


def test_static_is_offered_its_profile_far_from_the_envelope() -> None:
    control = Controller(library(), Static(Static.Config(profile="slow")))
    decision = control.choose(CONTEXT)
    assert (decision.profile, decision.reason) == ("slow", "static")
    assert "slow" not in {
        c.profile for c in Controller(library(), Analytic(Analytic.Config())).choose(CONTEXT).candidates
    }


def test_static_gives_way_to_raw_where_quality_forbids_it() -> None:
    decision = Controller(library(lower=0.5), Static(Static.Config(profile="slow"))).choose(CONTEXT)
    assert (decision.profile, decision.reason) == ("raw", "slow is not feasible")
    assert "below 0.99" in dict(decision.rejected)["slow"]


def test_static_needs_a_profile() -> None:
    with pytest.raises(ValidationError, match="profile"):
        Static.Config()  # type: ignore[call-arg]  # what a bare "static" in a config file comes to


@pytest.mark.parametrize(
    ("lossy_s", "min_gain", "expected"),
    [(0.90, 0.0, "lossy"), (0.90, 0.05, "lossy"), (0.96, 0.05, "raw"), (0.96, 0.0, "lossy"), (1.10, 0.05, "raw")],
)
def test_a_small_gain_is_not_worth_a_loss(lossy_s: float, min_gain: float, expected: str) -> None:
    policy = Analytic(Analytic.Config(min_gain=min_gain))
    offered = sorted(
        (
            Candidate("lossy", 4.0, lossy_s, 0.0, 0.0, 0.0, 0.99),
            Candidate("raw", 1.0, 1.0, 0.0, 0.0, 0.0, 1.0),
        ),
        key=lambda c: c.latency_s,
    )
    assert offered[policy.choose(ServiceContext(nbytes=1), offered).index].profile == expected


@pytest.mark.parametrize(
    ("lossy_s", "exact_s", "expected"),
    [
        (0.90, 0.92, "exact"),  # a loss gains too little, no loss enough
        (0.90, 0.97, "lossy"),
        (0.96, 0.97, "raw"),
        (0.98, 0.93, "exact"),
        (1.10, 0.97, "raw"),
        (1.10, 1.20, "raw"),
    ],
)
def test_a_small_gain_is_not_worth_coding(lossy_s: float, exact_s: float, expected: str) -> None:
    policy = Analytic(Analytic.Config(min_gain=0.05))
    rows = (("lossy", lossy_s, 0.99), ("exact", exact_s, 1.0), ("raw", 1.0, 1.0))
    offered = [Candidate(name, 2.0, s, 0.0, 0.0, 0.0, quality) for name, s, quality in rows]
    offered.sort(key=lambda c: c.latency_s)
    assert offered[policy.choose(ServiceContext(nbytes=1), offered).index].profile == expected
