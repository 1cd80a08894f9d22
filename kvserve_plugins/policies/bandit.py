"""Eq. 1 with what it does not explain: residuals learned per profile, seldom and safe exploration, cooldowns that end.

The controller learns speeds, ratios and bandwidth, and its estimates hold them. What is left (queues, other load,
whatever only shows in totals) is learned here: ``T_eff = T_hat + residual``, an EWMA per quality bucket, interval and
profile, with a fixed part and one per byte; raw has one like every other. Intervals are those of the lower envelope, by
the profile that is fastest there.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from math import inf
from multiprocessing.util import Finalize
from pathlib import Path

from pydantic import Field, model_validator

from kvserve_core.component import ComponentConfig
from kvserve_core.policy import Candidate, Choice, Decision, Outcome, Policy, ServiceContext
from kvserve_core.pricing import WHOLE
from kvserve_core.units import Duration
from kvserve_plugins.policies import _bandit_file
from kvserve_plugins.policies._arms import LEAST, UNKNOWN, Bucket, Memory, Place

FASTEST = Choice(0, "fastest")
TOO_LATE = "nothing meets the SLO with what was learned, least violating"
SURE = 2.0
"""A conservative estimate is this many deviations above ``T_eff``,"""
FALL = 8.0
"""and of what sends more than the best it is that at this part of the bandwidth, which may have fallen unseen."""


class Bandit(Policy):
    """Eq. 1 plus learned residuals, with rare and SLO-safe tries of the envelope's neighbours.

    Thread-safe; ``choose`` takes the lock only in a place that is new or was not brought up to date for some seconds.
    """

    class Config(ComponentConfig):
        """What it dares and what it remembers.

        epsilon: share of decisions that try a neighbour, in a place never seen; it falls to ``epsilon_floor``, by half
        every ``epsilon_half_life`` decisions. alpha: weight of a new outcome. A profile cools down for ``cooldown``
        when ``violations`` of its last ``window`` uses missed an SLO that they were expected to meet. ttl, max_arms:
        what is forgotten. state: a file that is read at the start and, except in a simulation, written at the first
        outcome, every ``save_every`` and in the end.
        """

        seed: int = 0
        epsilon: float = Field(0.1, ge=0, le=1)
        epsilon_floor: float = Field(0.01, ge=0, le=1)
        epsilon_half_life: float = Field(50.0, gt=0)
        alpha: float = Field(0.3, gt=0, lt=1)
        violations: int = Field(3, ge=1)
        window: int = Field(10, ge=1, le=64)
        cooldown: Duration = Field(10.0, ge=0)
        ttl: Duration = Field(300.0, gt=0)
        max_arms: int = Field(512, ge=8, le=65536)
        state: Path | None = None
        save_every: Duration = Field(60.0, gt=0)

        @model_validator(mode="after")
        def _ordered(self) -> Bandit.Config:
            if self.epsilon_floor > self.epsilon:
                raise ValueError(f"epsilon_floor {self.epsilon_floor} is above epsilon {self.epsilon}")
            if self.violations > self.window:
                raise ValueError(f"{self.violations} violations do not fit into a window of {self.window} uses")
            return self

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.memory = Memory(config.max_arms, config.ttl)
        self._random = random.Random(config.seed)
        self._draw = self._random.random
        self._most, self._alpha = config.epsilon, config.alpha
        self._lock = threading.Lock()
        self._keeper: _bandit_file.Keeper | None = None

    def start(self, clock: Callable[[], float]) -> None:
        """Read what a former run knew, dated by this clock, and keep what this one learns."""
        super().start(clock)
        if (state := self.config.state) is not None:
            _bandit_file.load(state, self.library, self.memory, clock())
            if not self.rehearsal:
                every_s = self.config.save_every
                self._keeper = _bandit_file.Keeper(state, self.library, self.memory, self._lock, clock, every_s)
                Finalize(self, self._keeper.end, exitpriority=0)  # with the policy or the process, a worker's too

    def choose(self, context: ServiceContext, candidates: Sequence[Candidate]) -> Choice:
        """The lowest ``T_eff`` among those that do not cool down, or now and then a neighbour of it."""
        now = self.clock()
        bucket = (context.workload, context.min_quality, candidates[0].profile)
        place = self.memory.places.get(bucket)
        if place is None or now >= place.stale_s:
            place = self._renew(bucket, now)
        place.decisions += 1
        if now < place.cooling_s:
            return self._around_cooldowns(context, candidates, place, now)
        known, best, best_s, nbytes = place.known, 0, candidates[0].latency_s, context.nbytes
        if known:
            best_s, model_s = inf, context.model_s
            for i, candidate in enumerate(candidates):
                latency_s = candidate.latency_s
                if (learned := known.get(candidate.profile)) is not None:
                    more_s, least_s = learned[0] + learned[1] * nbytes, LEAST * (latency_s - model_s)
                    latency_s += more_s if more_s > least_s else least_s
                if latency_s < best_s:
                    best, best_s = i, latency_s
        chance = self._draw()
        if chance < self._most and chance < self._epsilon(place):
            tried = self._try(context, candidates, place, best, best_s, now)
            if tried is not None:
                return Choice(tried, "explore")
        if context.slo_s is not None and best_s > context.slo_s:
            return Choice(best, TOO_LATE)
        return Choice(best, "fastest with what was learned") if best else FASTEST

    def _renew(self, bucket: Bucket, now: float) -> Place:
        with self._lock:
            place = self.memory.place(bucket, now)
            place.refresh(now)
        return place

    def _around_cooldowns(
        self, context: ServiceContext, candidates: Sequence[Candidate], place: Place, now: float
    ) -> Choice:
        estimates = [_estimate(c, place, context, now) for c in candidates]
        return Choice(*_best(estimates, context.slo_s))

    def observe(self, decision: Decision, outcome: Outcome) -> None:
        """Learn what the model does not explain of a whole fetch, and whether it came too late."""
        name, candidates, context = outcome.profile, decision.candidates, decision.context
        for chosen in candidates:
            if chosen.profile == name:
                break
        else:
            return
        nbytes, expected_s, spent_s, slo_s = context.nbytes, outcome.expected_s, outcome.spent_s, context.slo_s
        # It failed, or missed an SLO that it was expected to meet.
        late = not outcome.ok or (slo_s is not None and context.model_s + spent_s > slo_s >= chosen.latency_s)
        now = self.clock()
        with self._lock:
            place, arm = self.memory.arm((context.workload, context.min_quality, candidates[0].profile), name, now)
            if expected_s > 0 and outcome.ok and outcome.raw_bytes >= WHOLE * nbytes:
                place.outcomes += 1
                arm.learn(nbytes, spent_s - expected_s, expected_s, self._alpha, place.outcomes, now)
            if (late or arm.recent) and arm.used(late, self.config.window, self.config.violations):
                arm.until_s = now + self.config.cooldown
            place.refresh(now)
        if self._keeper is not None:
            self._keeper.learned(now)

    def residuals(self, decision: Decision) -> dict[str, float]:
        """Of the candidates that were tried in this place."""
        now, nbytes = self.clock(), decision.context.nbytes
        with self._lock:
            place = self.memory.places.get(_bucket(decision))
            if place is None:
                return {}
            tried = {c.profile: arm for c in decision.candidates if (arm := place.arms.get(c.profile)) is not None}
            return {name: arm.residual(nbytes, arm.kept(place.outcomes, now)) for name, arm in tried.items()}

    def save(self, path: Path) -> None:
        """Write what is known; a reader sees the old file or the new one.

        Raises:
            OSError: it cannot be written.
        """
        _bandit_file.save(path, self.library, self.memory, self._lock, self.clock())

    def _epsilon(self, place: Place) -> float:
        config = self.config
        left = float(0.5 ** (place.decisions / config.epsilon_half_life))
        return config.epsilon_floor + (config.epsilon - config.epsilon_floor) * left

    def _try(
        self,
        context: ServiceContext,
        candidates: Sequence[Candidate],
        place: Place,
        best: int,
        best_s: float,
        now: float,
    ) -> int | None:
        """A neighbour that may turn out faster than the best and, to be on the safe side, meets the SLO."""
        limit = inf if context.slo_s is None else context.slo_s
        worth = []
        for i in _neighbours(candidates, best):
            latency_s, spread, _ = _estimate(candidates[i], place, context, now)
            sends_more = candidates[i].cr < candidates[best].cr
            at_worst_s = latency_s + (FALL - 1.0) * candidates[i].transfer_s if sends_more else latency_s
            if latency_s * (1.0 - spread) < best_s and at_worst_s * (1.0 + SURE * spread) <= limit:
                worth.append(i)
        if len(worth) < 2:
            return worth[0] if worth else None
        return worth[self._draw() < 0.5]


_Estimate = tuple[float, float, bool]
"""``T_eff``, its relative deviation, and whether the profile cools down."""


def _bucket(decision: Decision) -> Bucket:
    context = decision.context
    return (context.workload, context.min_quality, decision.candidates[0].profile)


def _estimate(candidate: Candidate, place: Place, context: ServiceContext, now: float) -> _Estimate:
    latency_s, arm = candidate.latency_s, place.arms.get(candidate.profile)
    if arm is None:
        return latency_s, UNKNOWN, False
    kept = arm.kept(place.outcomes, now)
    residual = max(arm.residual(context.nbytes, kept), LEAST * (latency_s - context.model_s))
    return latency_s + residual, arm.spread(kept), now < arm.until_s


def _best(estimates: Sequence[_Estimate], slo_s: float | None) -> tuple[int, str]:
    """The lowest ``T_eff`` of those that do not cool down; of all of them when those would miss the SLO, or all do."""
    everyone = range(len(estimates))
    ready = [i for i in everyone if not estimates[i][2]]
    fastest = min(everyone, key=lambda i: estimates[i][0])
    if not ready:
        return fastest, "all candidates cool down, fastest"
    best = min(ready, key=lambda i: estimates[i][0])
    if slo_s is None or estimates[best][0] <= slo_s:
        return best, "fastest" if best == 0 else "fastest with what was learned"
    if estimates[fastest][0] <= slo_s:
        return fastest, "would cool down, but nothing else meets the SLO"
    return fastest, TOO_LATE


def _neighbours(candidates: Sequence[Candidate], best: int) -> list[int]:
    """Those with the next higher and the next lower ratio: at most two."""
    cr = candidates[best].cr
    above = below = -1
    for i, candidate in enumerate(candidates):
        if candidate.cr > cr:
            above = i if above < 0 or candidate.cr < candidates[above].cr else above
        elif candidate.cr < cr:
            below = i if below < 0 or candidate.cr > candidates[below].cr else below
    return [i for i in (below, above) if i >= 0]
