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
from kvserve_plugins.policies._arms import HALF_LIFE_S, NOTHING, UNKNOWN, Bucket, Memory, Place, faded

FASTEST = Choice(0, "fastest")
TOO_LATE = "nothing meets the SLO with what was learned, least violating"
SURE = 2.0
"""A conservative estimate is this many deviations above ``T_eff``,"""
FALL = 8.0
"""and of what sends more than the best it is that at this part of the bandwidth, which may have fallen unseen."""


class Bandit(Policy):
    """Eq. 1 plus learned residuals, with rare and SLO-safe tries of the envelope's neighbours.

    Thread-safe; ``choose`` takes the lock only in a place that is new.
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
        self._most, self._least, self._falling = config.epsilon, config.epsilon_floor, 1.0 / config.epsilon_half_life
        self._alpha, self._ttl_s = config.alpha, config.ttl
        self._told: dict[str, float] = {}
        self._last_told = -inf
        """When reports held the stages of a profile, and of any."""
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
        now, nbytes, model_s = self.clock(), context.nbytes, context.model_s
        bucket = (context.workload, context.min_quality, candidates[0].profile)
        place = self.memory.places.get(bucket)
        if place is None or now - place.used_s > self._ttl_s:
            place = self._new(bucket, now)
        place.decisions += 1
        place.used_s = now
        if now < place.cooling_s:
            return self._around_cooldowns(context, candidates, place, now)
        best, best_s, arms, outcomes, estimates = 0, inf, place.arms, place.outcomes, []
        for i, candidate in enumerate(candidates):
            latency_s = candidate.latency_s
            arm = arms.get(candidate.profile)
            if arm is not None and arm.line is not NOTHING:
                latency_s = arm.corrected(latency_s, model_s, nbytes, outcomes, now)
            if latency_s < best_s:
                best, best_s = i, latency_s
            estimates.append(latency_s)
        chance = self._draw()
        if chance < self._most and chance < self._epsilon(place):
            tried = self._try(context, candidates, estimates, place, best, now)
            if tried is not None:
                return Choice(tried, "explore")
        if context.slo_s is not None and best_s > context.slo_s:
            return Choice(best, TOO_LATE)
        return Choice(best, "fastest with what was learned") if best else FASTEST

    def _new(self, bucket: Bucket, now: float) -> Place:
        with self._lock:
            return self.memory.place(bucket, now)

    def _around_cooldowns(
        self, context: ServiceContext, candidates: Sequence[Candidate], place: Place, now: float
    ) -> Choice:
        estimates = [_estimate(c, place, context, now) for c in candidates]
        return Choice(*_best(estimates, context.slo_s))

    def observe(self, decision: Decision, outcome: Outcome) -> None:
        """Learn what the model does not explain of a whole fetch, and whether it came too late."""
        name, candidates, context = outcome.profile, decision.candidates, decision.context
        chosen = candidates[0]
        if chosen.profile != name:
            others = [c for c in candidates if c.profile == name]
            if not others:
                return
            chosen = others[0]
        nbytes, expected_s, spent_s, slo_s = context.nbytes, outcome.expected_s, outcome.spent_s, context.slo_s
        estimate_s = chosen.latency_s - context.model_s
        # It failed, or missed an SLO that it was expected to meet.
        late = not outcome.ok or (slo_s is not None and context.model_s + spent_s > slo_s >= chosen.latency_s)
        now = self.clock()
        with self._lock:
            place, arm = self.memory.arm((context.workload, context.min_quality, candidates[0].profile), name, now)
            if expected_s > 0 and outcome.ok and outcome.raw_bytes >= WHOLE * nbytes:
                place.outcomes += 1
                missed_s, unexplained_s = spent_s - estimate_s, spent_s - expected_s
                arm.learn(nbytes, unexplained_s, expected_s, self._alpha, place.outcomes, now, missed_s)
                if outcome.decode_s > 0 < outcome.transfer_s:
                    self._told[name] = self._last_told = now
            if (late or arm.recent) and arm.used(late, self.config.window, self.config.violations):
                arm.until_s = now + self.config.cooldown
                place.cooling_s = max(place.cooling_s, arm.until_s)
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
        floor = self._least
        return floor + (self._most - floor) * 0.5 ** (place.decisions * self._falling)

    def _try(
        self,
        context: ServiceContext,
        candidates: Sequence[Candidate],
        estimates: Sequence[float],
        place: Place,
        best: int,
        now: float,
    ) -> int | None:
        """A neighbour that may turn out faster than the best and, to be on the safe side, meets the SLO."""
        worth, slo_s = [], context.slo_s
        for i in _neighbours(candidates, best):
            if i == best:
                continue
            neighbour, estimate_s = candidates[i], estimates[i]
            hopes = self._hopes(neighbour, estimate_s, estimates[best], place, context.model_s, now)
            if hopes and (slo_s is None or _is_safe(neighbour, estimate_s, candidates[best], place, slo_s, now)):
                worth.append(i)
        if len(worth) < 2:
            return worth[0] if worth else None
        return worth[self._draw() < 0.5]

    def _hopes(
        self, candidate: Candidate, estimate_s: float, best_s: float, place: Place, model_s: float, now: float
    ) -> bool:
        """Whether a candidate may turn out faster than the best, by what nobody knows of it.

        Where reports hold stages, the controller knows the link, whoever sent over it, and the speeds of what was used
        of late: what is left is the speeds of the others. Else it is all of the latency but T_model.
        """
        if now - self._last_told > HALF_LIFE_S:
            return estimate_s - (estimate_s - model_s) * _spread(place, candidate.profile, now) < best_s
        unknown_s = (candidate.encode_s + candidate.decode_s) * UNKNOWN
        if estimate_s - unknown_s >= best_s:
            return False
        known = faded(now - self._told.get(candidate.profile, -inf))
        return estimate_s - unknown_s * (1.0 - known) < best_s


def _is_safe(candidate: Candidate, estimate_s: float, best: Candidate, place: Place, slo_s: float, now: float) -> bool:
    """Whether it meets the SLO at worst; what sends more than the best, with a link that has fallen unseen.

    Whatever was seen of its estimates, it is tried because something of it is not known.
    """
    spread = max(UNKNOWN, _spread(place, candidate.profile, now))
    if candidate.cr < best.cr:
        estimate_s += (FALL - 1.0) * candidate.transfer_s
    return estimate_s * (1.0 + SURE * spread) <= slo_s


_Estimate = tuple[float, bool]
"""``T_eff``, and whether the profile cools down."""


def _bucket(decision: Decision) -> Bucket:
    context = decision.context
    return (context.workload, context.min_quality, decision.candidates[0].profile)


def _spread(place: Place, profile: str, now: float) -> float:
    """Relative deviation to reckon with in a profile's estimate."""
    arm = place.arms.get(profile)
    return UNKNOWN if arm is None else arm.spread(arm.kept(place.outcomes, now))


def _estimate(candidate: Candidate, place: Place, context: ServiceContext, now: float) -> _Estimate:
    arm = place.arms.get(candidate.profile)
    if arm is None:
        return candidate.latency_s, False
    latency_s = arm.corrected(candidate.latency_s, context.model_s, context.nbytes, place.outcomes, now)
    return latency_s, now < arm.until_s


def _best(estimates: Sequence[_Estimate], slo_s: float | None) -> tuple[int, str]:
    """The lowest ``T_eff`` of those that do not cool down; of all of them when those would miss the SLO, or all do."""
    everyone = range(len(estimates))
    ready = [i for i in everyone if not estimates[i][1]]
    fastest = min(everyone, key=lambda i: estimates[i][0])
    if not ready:
        return fastest, "all candidates cool down, fastest"
    best = min(ready, key=lambda i: estimates[i][0])
    if slo_s is None or estimates[best][0] <= slo_s:
        return best, "fastest" if best == 0 else "fastest with what was learned"
    if estimates[fastest][0] <= slo_s:
        return fastest, "would cool down, but nothing else meets the SLO"
    return fastest, TOO_LATE


def _neighbours(candidates: Sequence[Candidate], best: int) -> tuple[int, int]:
    """Those with the next lower and the next higher ratio; ``best`` where there is none."""
    cr, lower, higher, below, above = candidates[best].cr, 0.0, inf, best, best
    for i, candidate in enumerate(candidates):
        other = candidate.cr
        if lower < other < cr:
            lower, below = other, i
        elif cr < other < higher:
            higher, above = other, i
    return below, above
