"""The strategy space: every pipeline that the families and the installed components allow. Counted, listed, sampled."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from blake3 import blake3

from kvserve_core.errors import ConfigError
from kvserve_core.profile import PipelineSpec
from kvserve_core.profiling.families import SpaceConfig
from kvserve_core.profiling.options import Option, agree, as_value, merged
from kvserve_core.profiling.point import Point, Value, Values

MAX_NAME = 120


@dataclass(frozen=True)
class Block:
    """A product: one option of each factor, in every combination. The last factor turns fastest."""

    factors: tuple[tuple[Option, ...], ...]

    @property
    def size(self) -> int:
        """Combinations."""
        return prod(len(f) for f in self.factors)

    def pick(self, index: int) -> list[Option]:
        """Combination number ``index``."""
        found = []
        for factor in reversed(self.factors):
            index, at = divmod(index, len(factor))
            found.append(factor[at])
        return found[::-1]


@dataclass(frozen=True)
class FamilySpace:
    """The pipelines of one family. planes: name of the plane that each factor of a block stands for, in order.

    dropped: reason -> chains left out for it. The three factors after the planes are layers a segment, exempt tokens
    and protected layers.
    """

    name: str
    planes: tuple[str, ...]
    blocks: tuple[Block, ...]
    dropped: Mapping[str, int]

    @property
    def size(self) -> int:
        """Pipelines."""
        return sum(block.size for block in self.blocks)

    def point(self, index: int) -> Point:
        """Pipeline number ``index``."""
        for block in self.blocks:
            if index < block.size:
                return self._point(block.pick(index))
            index -= block.size
        raise IndexError(f"family {self.name!r} has {self.size} pipelines")

    def _point(self, options: Sequence[Option]) -> Point:
        *chains, layer_block, sinks, raw = options
        planes = dict(zip(self.planes, (c.body for c in chains), strict=True))
        beside = {"layer_block": layer_block.body, "sink_tokens": sinks.body, "raw_layers": raw.body}
        spec = PipelineSpec.parse({"planes": planes} | beside, f"families.{self.name}")
        values = merged([(("family", self.name),), *(option.values for option in options)])
        return Point(values, spec, self._label(values))

    def _label(self, values: Values) -> str:
        parts = [_tag(name.split("."), value, self.planes) for name, value in values if name in self._varying]
        return re.sub(r"[^A-Za-z0-9._-]+", "_", "-".join([self.name, *parts]))[:MAX_NAME]

    @cached_property
    def _varying(self) -> frozenset[str]:
        """Dimensions in which pipelines of this family differ."""
        seen: dict[str, set[Value]] = {}
        options = [option for block in self.blocks for factor in block.factors for option in factor]
        for name, value in (pair for option in options for pair in option.values):
            seen.setdefault(name, set()).add(value)
        return frozenset(name for name, values in seen.items() if len(values) > 1)


@dataclass(frozen=True)
class Space:
    """All families. left_out: family -> why it has no pipeline here."""

    config: SpaceConfig
    families: tuple[FamilySpace, ...]
    left_out: Mapping[str, str]

    def count(self) -> int:
        """Pipelines in all families; worked out, not listed."""
        return sum(family.size for family in self.families)

    def points(self, limit: int | None = None, seed: int = 0) -> list[Point]:
        """Every pipeline, or ``limit`` of them: families share the limit evenly, and each is drawn without repetition.

        Pipelines that are equal appear once; names are made unique.

        Raises:
            ConfigError: the space is empty, or holds more than can be listed and no limit is given.
        """
        if not self.families:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.left_out.items())
            raise ConfigError(f"the search space is empty ({reasons}); install or calibrate what is missing")
        if limit is None and self.count() > MOST:
            raise ConfigError(f"the search space has {self.count()} pipelines; give a limit of at most {MOST}")
        shares = share([family.size for family in self.families], self.count() if limit is None else limit)
        rng = random.Random(seed)
        chosen = (
            family.point(i)
            for family, n in zip(self.families, shares, strict=True)
            for i in sorted(rng.sample(range(family.size), n))
        )
        return list(_unique(chosen))

    def dropped(self) -> Counter[str]:
        """Reason -> chains that were left out for it."""
        total: Counter[str] = Counter()
        for family in self.families:
            total.update(family.dropped)
        return total


MOST = 1_000_000
"""Pipelines that are listed without a limit: about a minute's work."""


def share(sizes: Sequence[int], total: int) -> list[int]:
    """``total`` divided evenly over places of these sizes; what a small place cannot take goes to the others.

    >>> share([2, 100, 100], 50)
    [2, 24, 24]
    """
    shares, left = [0] * len(sizes), min(total, sum(sizes))
    for rank, i in enumerate(sorted(range(len(sizes)), key=lambda i: sizes[i])):
        shares[i] = min(sizes[i], left // (len(sizes) - rank))
        left -= shares[i]
    return shares


def _unique(points: Iterator[Point]) -> Iterator[Point]:
    keys: set[str] = set()
    names: set[str] = set()
    for point in points:
        if point.key not in keys:
            name = point.name if point.name not in names else f"{point.name}-{point.key}"
            keys.add(point.key)
            names.add(name)
            yield point if name == point.name else Point(point.values, point.spec, name)


def fingerprint(points: Sequence[Point]) -> str:
    """blake3 over the keys of a pool: what a journal belongs to."""
    return blake3(",".join(p.key for p in points).encode()).hexdigest()


def _tag(name: list[str], value: Value, planes: Sequence[str]) -> str:
    """``k.uniform.levels`` 12 -> ``k.levels12``; of text, the plane and the text; of a list, its numbers."""
    plane, rest = ([name[0]], name[1:]) if name[0] in planes else ([], name)
    plane = [p for p in plane if p != "*"]
    field = rest[1:] if len(rest) > 1 else rest
    if isinstance(value, str) and value.startswith("["):
        return ".".join([*plane, *field]) + (value.strip("[]").replace(",", ".") or "-none")
    if isinstance(value, str):
        return ".".join([*plane, value])
    return ".".join([*plane, *field]) + (f"{value:g}" if isinstance(value, float) else str(value))


def common(name: str, values: Sequence[object]) -> tuple[Option, ...]:
    """A factor that stands beside the chains."""
    made = [Option(v) for v in values]
    named = [Option(v, ((name, as_value(list(v) if isinstance(v, tuple) else v)),)) for v in values]
    return tuple(named if len(values) > 1 else made)


def blocks(planes: Sequence[Sequence[Option]], beside: Sequence[tuple[Option, ...]]) -> tuple[Block, ...]:
    """Products of the planes' options that agree on what planes share: dimensions named alike in several planes."""
    shared = _shared(planes)
    grouped = [_by(options, shared) for options in planes]
    return tuple(
        Block((*(tuple(g) for g in groups), *beside))
        for groups in product(*(each.values() for each in grouped))
        if agree([Option(None, tuple(p for p in group[0].values if p[0] in shared)) for group in groups])
    )


def _shared(planes: Sequence[Sequence[Option]]) -> frozenset[str]:
    count = Counter(name for options in planes for name in {n for o in options for n, _ in o.values})
    return frozenset(name for name, n in count.items() if n > 1)


def _by(options: Sequence[Option], shared: frozenset[str]) -> dict[Values, list[Option]]:
    found: dict[Values, list[Option]] = {}
    for option in options:
        found.setdefault(tuple(p for p in option.values if p[0] in shared), []).append(option)
    return found
