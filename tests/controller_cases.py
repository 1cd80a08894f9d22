"""Controllers and profiles that several tests share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvserve_core.component import ComponentConfig
from kvserve_core.controller import Controller
from kvserve_core.latency import Speed
from kvserve_core.library import Profile, ProfileLibrary, QualityRecord, built_in
from kvserve_core.policy import Candidate, Choice, Decision, Outcome, Policy, ServiceContext
from kvserve_core.profile import RAW_CHAIN, PipelineSpec
from kvserve_plugins.policies.analytic import Analytic

MIB = 2**20
GBPS = 1e9 / 8
FREE_RAW = built_in("raw", 1.0, Speed(), Speed())


class Clock:
    """A clock that tests move."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Recorder(Policy):
    """Picks the last candidate and keeps what it was shown."""

    def __init__(self) -> None:
        super().__init__(ComponentConfig())
        self.seen: list[Sequence[Candidate]] = []
        self.outcomes: list[Outcome] = []

    def choose(self, context: ServiceContext, candidates: Sequence[Candidate]) -> Choice:
        self.seen.append(candidates)
        return Choice(len(candidates) - 1, "last")

    def observe(self, decision: Decision, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


def analytic() -> Analytic:
    return Analytic(Analytic.Config())


def profile(name: str, cr: float, rate: float, fixed_s: float = 0.0, lower: float | None = 1.0, **more: Any) -> Profile:
    quality = {} if lower is None else {"default": QualityRecord(value=1, lower=lower, upper=1, metric="m", samples=3)}
    speed = Speed.of(rate, fixed_s)
    pipeline = more.pop("pipeline", PipelineSpec(planes={"*": RAW_CHAIN}))
    fields = {"quality": quality} | more
    return Profile(name=name, pipeline=pipeline, cr=cr, encode=speed, decode=speed, **fields)


def library(*profiles: Profile, fingerprint: str = "f") -> ProfileLibrary:
    return ProfileLibrary(model_id="m", fingerprint=fingerprint, device="d", created="now", profiles=profiles)


def three(**more: Any) -> Controller:
    """Free raw, a fast profile at 5x and a slow one at 9x: the shape of a 5, 25 and 150 Gbps replay."""
    made = library(FREE_RAW, profile("slow9", 8.62, 12e9), profile("fast5", 5.11, 26e9))
    return Controller(made, analytic(), **more)
