"""Seeded samples that keep the proportions of kinds, and confidence bounds of shares and of ratios."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from kvserve_core.errors import ConfigError
from kvserve_core.evaluation.quality import Interval

T = TypeVar("T")
Z95 = 1.959964
RESAMPLES = 2000


def stratified(items: Sequence[T], kind: Callable[[T], Hashable], count: int | None, seed: int) -> list[T]:
    """``count`` of the items (None: all), as even over kinds as there are items, in their order.

    Within a kind every item has the same chance. The first items drawn for a small count are among those of a larger
    one with the same seed.
    """
    if count is None or count >= len(items):
        return list(items)
    rng = random.Random(seed)
    queues: dict[Hashable, list[int]] = {}
    for i, item in enumerate(items):
        queues.setdefault(kind(item), []).append(i)
    for queue in queues.values():
        rng.shuffle(queue)
    turns = [queue[turn] for turn in range(len(items)) for queue in queues.values() if turn < len(queue)]
    return [items[i] for i in sorted(turns[:count])]


def evenly(total: int, count: int | None, seed: int) -> list[int]:
    """``count`` of ``range(total)``, one at random from each of ``count`` equal stretches; None: all."""
    if count is None or count >= total:
        return list(range(total))
    rng = random.Random(seed)
    edges = [total * i // count for i in range(count + 1)]
    return [rng.randrange(edges[i], edges[i + 1]) for i in range(count)]


def share(right: int, of: int) -> Interval:
    """A share with its 95 % Wilson interval (Wilson 1927): sound for small samples and near 0 and 1.

    Raises:
        ConfigError: a share of nothing.
    """
    if of < 1:
        raise ConfigError("a share of no samples has no value; give at least one")
    p, z2 = right / of, Z95**2 / of
    middle, half = (p + z2 / 2) / (1 + z2), Z95 * math.sqrt(p * (1 - p) / of + z2 / (4 * of)) / (1 + z2)
    return Interval(p, max(0.0, middle - half), min(1.0, middle + half))


def ratio(test: Sequence[float], reference: Sequence[float], seed: int) -> Interval:
    """``sum(test) / sum(reference)`` of paired samples, cut to [0, 1], with a 95 % bootstrap interval over pairs.

    Pairs that agree everywhere leave no spread to resample: then the bound below is that of a share without a miss.

    Raises:
        ConfigError: the reference scores nothing, so there is nothing to keep.
    """
    if sum(reference) <= 0:
        raise ConfigError("the uncompressed model scores nothing on these samples; choose a task that it can do")
    value, count = _cut(sum(test) / sum(reference)), len(test)
    floor = share(count, count).low
    rng = random.Random(seed)
    found = sorted(filter(math.isfinite, (_resampled(test, reference, rng) for _ in range(RESAMPLES))))
    low, high = _cut(found[int(0.025 * len(found))]), _cut(found[int(0.975 * len(found))])
    equal = all(a == b for a, b in zip(test, reference, strict=True))
    return Interval(value, min(value, floor if equal else low), max(value, high))


def unresolved(quality: Interval, samples: int, tolerance: float) -> str:
    """Why these samples cannot tell a loss of ``tolerance`` from none; empty when they can."""
    gap = quality.mean - quality.low
    if gap <= tolerance:
        return ""
    return f"{samples} samples leave open a further loss of {gap:.2g}, the tolerance is {tolerance:.2g}"


def _resampled(test: Sequence[float], reference: Sequence[float], rng: random.Random) -> float:
    drawn = rng.choices(range(len(test)), k=len(test))
    below = sum(reference[i] for i in drawn)
    return sum(test[i] for i in drawn) / below if below > 0 else math.nan


def _cut(x: float) -> float:
    return min(1.0, max(0.0, x))
