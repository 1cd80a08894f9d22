"""What a KV cache is, independent of any engine: planes, layer groups, regions, shards and the token grid.

Every index is global: layer and head numbers of the model, absolute token positions. No block size, no rank
order and no engine layout appears here. Tensors are ``[L, H, T, D]`` (layer, head, token, dim). Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from typing import Literal

from blake3 import blake3

from kvserve_core.errors import UnsupportedSpecError

Plane = str
SEGMENT_TOKENS = 256
MAX_TOKENS = 2**31 - 1
COMPOSITE: dict[Plane, tuple[Plane, ...]] = {"kv": ("k", "v"), "mla": ("latent", "rope")}
"""Planes made of others side by side along D."""


class DType(StrEnum):
    """The closed set of element types that may appear in a plane, a parameter or a frame."""

    BF16 = "bfloat16"
    F16 = "float16"
    F32 = "float32"
    U8 = "uint8"
    I16 = "int16"
    I32 = "int32"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _ITEMSIZE[self.value]

    @property
    def is_float(self) -> bool:
        """Whether elements are floating point."""
        return self in (DType.BF16, DType.F16, DType.F32)


_ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "uint8": 1, "int16": 2, "int32": 4}


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of a plane part: what ``derope`` needs to undo it."""

    inv_freq: tuple[float, ...]
    rotary_dim: int
    style: Literal["neox", "gptj"]
    attn_factor: float = 1.0


@dataclass(frozen=True)
class PlanePart:
    """A named slice of a plane's D axis."""

    name: str
    dim: int
    rope: RopeSpec | None = None


@dataclass(frozen=True)
class PlaneSpec:
    """One tensor per layer. ``num_heads`` counts the heads of the whole model, not of a rank."""

    name: Plane
    num_heads: int
    parts: tuple[PlanePart, ...]
    dtype: DType

    @property
    def dim(self) -> int:
        """Elements per head and token."""
        return sum(part.dim for part in self.parts)


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share planes and a block table: a vLLM KV group, an SGLang pool.

    ``window``: tokens older than it are never sent. ``unit="state"``: one opaque u8 cell per request (SSM state,
    auxiliary row), lossless chains only.
    """

    id: int
    layers: tuple[int, ...]
    planes: tuple[PlaneSpec, ...]
    window: int | None = None
    unit: Literal["token", "state"] = "token"

    def plane(self, name: Plane) -> PlaneSpec:
        """The plane of that name; ``kv`` and ``mla`` are composed from their parts.

        Raises:
            UnsupportedSpecError: no such plane, or parts that cannot stand side by side.
        """
        for plane in self.planes:
            if plane.name == name:
                return plane
        names = {p.name for p in self.planes}
        members = COMPOSITE.get(name, ())
        if not members or not names.issuperset(members):
            raise UnsupportedSpecError(f"layer group {self.id} has planes {sorted(names)}, not {name!r}")
        made = [self.plane(m) for m in members]
        if len({(p.num_heads, p.dtype) for p in made}) > 1:
            raise UnsupportedSpecError(f"planes {members} differ in heads or dtype and cannot form {name!r}")
        return PlaneSpec(name, made[0].num_heads, tuple(q for p in made for q in p.parts), made[0].dtype)


@dataclass(frozen=True)
class KVSpec:
    """The cache of one model. Two engines that serve the same model build equal specs."""

    model_id: str
    groups: tuple[LayerGroup, ...]

    def __post_init__(self) -> None:
        ids = [g.id for g in self.groups]
        if len(set(ids)) < len(ids):
            raise UnsupportedSpecError(f"layer groups must have ids of their own, got {ids}")
        for group in self.groups:
            names = [p.name for p in group.planes]
            if len(set(names)) < len(names) or not COMPOSITE.keys().isdisjoint(names):
                raise UnsupportedSpecError(
                    f"layer group {group.id} declares planes {names}; name each part once, and 'k' and 'v' or 'latent'"
                    f" and 'rope' instead of {sorted(COMPOSITE)}"
                )

    @cached_property
    def fingerprint(self) -> str:
        """blake3 of the canonical JSON: equal on every engine, rank and block size."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return blake3(text.encode()).hexdigest()

    def group(self, group_id: int) -> LayerGroup:
        """The layer group with this id."""
        for group in self.groups:
            if group.id == group_id:
                return group
        raise UnsupportedSpecError(f"no layer group {group_id}; this model has {[g.id for g in self.groups]}")

    def nbytes(self, at: Region) -> int:
        """Original bytes of a region."""
        plane = self.group(at.group).plane(at.plane)
        return len(at.layers) * len(at.heads) * at.num_tokens * plane.dim * plane.dtype.itemsize

    def token_bytes(self) -> int:
        """Original bytes of one token over all token groups, all heads."""
        return sum(
            len(g.layers) * p.num_heads * p.dim * p.dtype.itemsize
            for g in self.groups
            if g.unit == "token"
            for p in g.planes
        )


@dataclass(frozen=True)
class Region:
    """The only address: for kernels, frames, selections and errors. Tokens are ``[start, stop)``, absolute."""

    group: int
    plane: Plane
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        """Tokens covered."""
        return self.stop - self.start

    def overlaps(self, other: Region) -> bool:
        """Whether the two share an element; ``kv`` overlaps ``k``."""
        return self.start < other.stop and other.start < self.stop and _same_place(self, other)

    def __str__(self) -> str:
        layers, heads = _span(self.layers), _span(self.heads)
        return f"group {self.group} plane {self.plane} layers {layers} heads {heads} tokens {self.start}-{self.stop}"


@dataclass(frozen=True)
class Shard:
    """The part of a model one rank holds: its layers, and its place among ``size`` tensor-parallel ranks.

    Heads follow the rule of vLLM and SGLang: contiguous slices when there are at least ``size`` heads, else
    each head replicated on ``size / num_heads`` consecutive ranks.
    """

    layers: tuple[int, ...]
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise UnsupportedSpecError(f"rank {self.rank} is not one of {self.size} tensor-parallel ranks")

    def heads(self, num_heads: int) -> tuple[int, ...]:
        """Global indices of the heads this rank holds of a plane with ``num_heads``."""
        if num_heads >= self.size:
            if num_heads % self.size:
                raise UnsupportedSpecError(f"{num_heads} heads do not divide over {self.size} ranks")
            each = num_heads // self.size
            return tuple(range(self.rank * each, (self.rank + 1) * each))
        if self.size % num_heads:
            raise UnsupportedSpecError(f"{num_heads} heads do not replicate evenly over {self.size} ranks")
        return (self.rank * num_heads // self.size,)


def whole(kv: KVSpec) -> Shard:
    """The shard of a single rank that holds everything."""
    return Shard(tuple(sorted({layer for g in kv.groups for layer in g.layers})))


def base_planes(plane: Plane) -> frozenset[Plane]:
    """``kv`` -> {k, v}; a plain plane -> itself."""
    return frozenset(COMPOSITE.get(plane, (plane,)))


def cells(tokens: range, size: int = SEGMENT_TOKENS) -> Iterator[range]:
    """Cells of the absolute grid cut to ``tokens``: cell i is tokens ``[size i, size (i + 1))``."""
    start = tokens.start
    while start < tokens.stop:
        stop = min((start // size + 1) * size, tokens.stop)
        yield range(start, stop)
        start = stop


def covering(plan: Sequence[Region], want: Sequence[Region]) -> list[int]:
    """Indices into ``plan`` of the smallest set of whole segments that covers ``want``."""
    lanes: dict[tuple[int, Plane, tuple[int, ...], tuple[int, ...]], list[Region]] = {}
    found = []
    for i, at in enumerate(plan):
        lane = (at.group, at.plane, at.layers, at.heads)
        if lane not in lanes:  # a plan repeats few of them, cell after cell
            lanes[lane] = [w for w in want if _same_place(at, w)]
        if any(at.start < w.stop and w.start < at.stop for w in lanes[lane]):
            found.append(i)
    return found


def _same_place(at: Region, other: Region) -> bool:
    return (
        at.group == other.group
        and not base_planes(at.plane).isdisjoint(base_planes(other.plane))
        and not set(at.layers).isdisjoint(other.layers)
        and not set(at.heads).isdisjoint(other.heads)
    )


def _span(values: tuple[int, ...]) -> str:
    if len(values) > 1 and values[-1] - values[0] + 1 == len(values):  # ascending, so without gaps
        return f"{values[0]}-{values[-1]}"
    return ",".join(map(str, values))
