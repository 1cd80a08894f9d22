"""Bayesian search for the highest ratio at a quality floor: ask for candidates, tell what was measured.

Ratios are known for every candidate beforehand, by table cost; only quality is modelled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.random import default_rng
from numpy.typing import NDArray

from kvserve_core.errors import ConfigError
from kvserve_core.profiling.acquisition import (
    above_failure,
    acquisition,
    below_best,
    chance,
    clearly_bad,
    feasible,
    margin,
    variance,
)
from kvserve_core.profiling.encoding import Matrix, one_hot_min_max, ordinal, scaled
from kvserve_core.profiling.gp import Belief, believe
from kvserve_core.profiling.point import Measurement, Point
from kvserve_core.profiling.trend import slope

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Options:
    """How to search.

    floors: quality floors; proposals serve them in turn. cold: points before the model, spread over the ratios.
    explore, decay: lambda_0 and its decay by evaluation. prune: weight of a candidate whose ratio is below that of the
    best feasible one, or above that of a clear failure with the same choices; 1 switches it off. patience: stop after
    so many evaluations in a row that were not better, once no candidate is expected to give ``worth`` more ratio; 0
    never stops. slope: also believe that quality falls with the ratio as it did within what was measured. encode: False
    numbers the choices instead of one-hot, for comparison.
    """

    floors: tuple[float, ...] = (0.97,)
    budget: int = 40
    cold: int = 4
    explore: float = 0.3
    decay: float = 0.9
    prune: float = 0.1
    patience: int = 8
    worth: float = 0.01
    slope: bool = True
    encode: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, good, wanted in (
            ("floors", self.floors, bool(self.floors) and all(0 < f <= 1 for f in self.floors), "in (0, 1]"),
            ("budget", self.budget, self.budget >= 1, "at least 1"),
            ("cold", self.cold, self.cold >= 1, "at least 1"),
            ("explore", self.explore, self.explore >= 0, "at least 0"),
            ("decay", self.decay, 0 <= self.decay <= 1, "in [0, 1]"),
            ("prune", self.prune, 0 < self.prune <= 1, "in (0, 1]"),
            ("patience", self.patience, self.patience >= 0, "at least 0"),
            ("worth", self.worth, self.worth >= 0, "at least 0"),
            ("seed", self.seed, 0 <= self.seed < 2**32, "from 0 to 2^32 - 1"),
        ):
            if not good:
                raise ConfigError(f"must be {wanted}, got {value!r}", name)


@dataclass
class Search:
    """State of a search over a pool. ``ratios``: estimated, 0 where a candidate cannot be encoded.

    The same calls give the same proposals: who asks and tells again what was told gets to the same place.
    """

    points: Sequence[Point]
    ratios: Sequence[float]
    options: Options = Options()
    told: dict[int, Measurement] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._cr: Matrix = np.array(self.ratios, np.float64)
        self._open: Flags = self._cr > 0
        if not self._open.any():
            raise ConfigError("no candidate can be encoded; widen the search space")
        self._index = {p.key: i for i, p in enumerate(self.points)}
        self._inputs = _inputs(self.points, self._cr, self.options.encode)
        self._groups = _groups(self.points)
        self._cold = _spread(self._cr, self._open, self.options)
        self._asked: set[int] = set()
        self._since_better = 0

    @property
    def left(self) -> int:
        """Evaluations that may still be asked for."""
        return min(self.options.budget, int(self._open.sum())) - len(self._asked)

    def ask(self, n: int = 1) -> list[Point]:
        """Up to ``n`` candidates to measure; none when nothing is left.

        Those that are still being measured count as if they had given what is expected of them.
        """
        found = []
        for _ in range(min(n, self.left)):
            i = self._cold.pop(0) if self._cold else self._next()
            self._asked.add(i)
            found.append(self.points[i])
        return found

    def tell(self, measurements: Iterable[Measurement]) -> None:
        """What was measured.

        Raises:
            ConfigError: of a point that is not in the pool.
        """
        for m in measurements:
            if m.key not in self._index:
                raise ConfigError(f"measurement of {m.key!r}, which is not in this search space; use its own journal")
            before, i = self._score(), self._index[m.key]
            self.told[i] = m
            self._asked.add(i)
            if m.cr > 0 and not m.error:
                self._cr[i] = m.cr
            self._since_better = 0 if self._score() > before else self._since_better + 1

    def best(self, floor: float | None = None) -> Measurement | None:
        """The highest measured ratio whose lower quality bound keeps the floor."""
        floor = self.options.floors[0] if floor is None else floor
        return max((m for m in self.told.values() if feasible(m, floor)), key=lambda m: m.cr, default=None)

    def stopped(self) -> str:
        """Why the search is over; empty while it is not."""
        if self.left <= 0:
            return "budget spent" if len(self._asked) >= self.options.budget else "nothing left to measure"
        patience = self.options.patience
        if not patience or self._since_better < patience or self._cold:
            return ""
        beliefs = self._beliefs()
        hopeless = all(self._gain(beliefs, floor) < self.options.worth for floor in self.options.floors)
        return "nothing better expected" if hopeless else ""

    def _score(self) -> float:
        return sum(m.cr for f in self.options.floors if (m := self.best(f)))

    def _gain(self, beliefs: Sequence[Belief], floor: float) -> float:
        """The largest expected relative improvement over the best that keeps this floor."""
        if (best := self.best(floor)) is None:
            return float("inf")
        gain = np.maximum(self._cr / best.cr - 1, 0) * self._chance(beliefs, floor)
        return float(np.where(self._free(), gain, 0).max())

    def _free(self) -> Flags:
        free = self._open.copy()
        free[list(self._asked)] = False
        return free

    def _next(self) -> int:
        turn = max(len(self._asked) - self.options.cold, 0)
        floor = self.options.floors[turn % len(self.options.floors)]
        beliefs = self._beliefs()
        explore = self.options.explore * self.options.decay**turn
        value = acquisition(self._cr, self._chance(beliefs, floor), self._weights(floor), beliefs[0], explore)
        return int(np.where(self._free(), value, -1.0).argmax())

    def _beliefs(self) -> list[Belief]:
        """The model over what was told; and, where quality fell with the ratio, one in which it goes on falling so."""
        good = [i for i, m in self.told.items() if not m.error]
        if not good:
            return [Belief(np.full(len(self._cr), min(self.options.floors)), np.ones(len(self._cr)))]
        x, quality = _log(self._cr), np.array([self.told[i].quality for i in good])
        falls = slope(x[good], quality, self._groups[good]) if self.options.slope else 0.0
        return [self._belief(good, quality, trend * x) for trend in ((0.0, falls) if falls else (0.0,))]

    def _belief(self, good: list[int], quality: Matrix, trend: Matrix) -> Belief:
        """A fit of what is above a trend. Candidates that are being measured stand in with their expected quality."""
        above, seed = quality - trend[good], self.options.seed
        noise = np.array([variance(self.told[i]) for i in good])
        belief = believe(self._inputs, good, above, noise, seed)
        if pending := sorted(self._asked - self.told.keys()):
            expected = np.concatenate([above, belief.mean[pending]])
            noise = np.concatenate([noise, np.full(len(pending), noise.mean())])
            belief = believe(self._inputs, good + pending, expected, noise, seed)
        return Belief(belief.mean + trend, belief.std)

    def _chance(self, beliefs: Sequence[Belief], floor: float) -> Matrix:
        """By the belief that gives a candidate more: neither quality that falls nor quality that does not is sure."""
        below = margin(self.told.values())
        found: Matrix = np.max([chance(belief, below, floor) for belief in beliefs], axis=0)
        return found

    def _weights(self, floor: float) -> Matrix:
        """Two-sided pruning, soft."""
        prune, best = self.options.prune, self.best(floor)
        weights = np.ones_like(self._cr) if best is None else below_best(self._cr, best.cr, prune)
        for i, m in self.told.items():
            if clearly_bad(m, floor):
                alike = self._groups == self._groups[i]
                weights = np.minimum(weights, above_failure(self._cr, alike, self._cr[i], prune))
        return weights


def _inputs(points: Sequence[Point], ratios: Matrix, encode: bool) -> Matrix:
    if not encode:
        return ordinal(points)
    return np.hstack([one_hot_min_max(points), scaled(_log(ratios))[:, None]])


def _log(ratios: Matrix) -> Matrix:
    """Of the ratios; one that is not known, for the candidate cannot be encoded, counts as the lowest."""
    known: Matrix = np.log(np.maximum(ratios, ratios[ratios > 0].min()))
    return known


def _groups(points: Sequence[Point]) -> NDArray[np.int64]:
    """One number for candidates that differ in numbers only: among them quality mostly falls with the ratio."""
    known: dict[object, int] = {}
    choices = [tuple(pair for pair in p.values if isinstance(pair[1], (str, bool))) for p in points]
    return np.array([known.setdefault(each, len(known)) for each in choices])


def _spread(ratios: Matrix, can: Flags, options: Options) -> list[int]:
    """The cold start: the candidates by ratio, cut into ``cold`` equal parts, one at random of each."""
    rng = default_rng(options.seed)
    order = [i for i in np.argsort(-ratios, kind="stable") if can[i]]
    parts = np.array_split(np.array(order), min(options.cold, len(order)))
    return [int(rng.choice(part)) for part in parts]
