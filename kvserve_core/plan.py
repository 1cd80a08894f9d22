"""The planner: how a cache is cut into segments. Pure and the same on both sides; independent of prefill chunking."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvserve_core.errors import UnsupportedSpecError
from kvserve_core.profile import PipelineSpec
from kvserve_core.spec import COMPOSITE, KVSpec, LayerGroup, Plane, PlaneSpec, Region, Shard, cells
from kvserve_core.wire import MAX_SEGMENT_BYTES

RAW_CHAIN_ID = 0


@dataclass(frozen=True)
class Planned:
    """A segment to be: its number in the frame, its region, its chain (0 is raw)."""

    index: int
    at: Region
    chain: int


class ChainTraits(NamedTuple):
    """What the planner must know of a chain: its id, and its stages' capabilities combined."""

    id: int
    head_local: bool
    layer_local: bool
    token_multiple: int


RAW_TRAITS = ChainTraits(RAW_CHAIN_ID, True, True, 1)


@dataclass(frozen=True)
class Lane:
    """One plane, layer block and head group of a layer group: every cell gives it the same segments."""

    group: LayerGroup
    plane: PlaneSpec
    chain: ChainTraits
    layers: tuple[int, ...]
    heads: tuple[int, ...]


def lanes(spec: PipelineSpec, kv: KVSpec, shard: Shard, traits: Callable[[Plane], ChainTraits]) -> list[Lane]:
    """Lanes in wire order. Protected layers get lanes of their own with the raw chain.

    Raises:
        UnsupportedSpecError: this shard cuts through a head group or a layer block.
    """
    out = []
    for group in sorted(kv.groups, key=lambda g: (g.unit == "state", g.id)):
        for plane in planes_of(spec, group):
            chain = traits(plane.name)
            for block in _blocks(spec, kv, group, shard, chain):
                use = RAW_TRAITS if block[0] in _raw_layers(spec, kv) else chain
                for heads in _head_groups(spec, plane, shard, chain):
                    out.append(Lane(group, plane, use, block, heads))
    return out


def planes_of(spec: PipelineSpec, group: LayerGroup) -> list[PlaneSpec]:
    """The group's planes, with those that the spec names as a composite joined."""
    joined = {m: c for c, members in COMPOSITE.items() if c in spec.planes for m in members}
    names = dict.fromkeys(_join_name(group, p.name, joined) for p in group.planes)
    return [group.plane(name) for name in names]


def _join_name(group: LayerGroup, plane: Plane, joined: dict[Plane, Plane]) -> Plane:
    composite = joined.get(plane)
    here = {p.name for p in group.planes}
    return composite if composite and here.issuperset(COMPOSITE[composite]) else plane


def _raw_layers(spec: PipelineSpec, kv: KVSpec) -> frozenset[int]:
    layers = sorted({layer for g in kv.groups for layer in g.layers})
    for i in spec.raw_layers:
        if not -len(layers) <= i < len(layers):
            raise UnsupportedSpecError(f"layer {i} of a model with {len(layers)} layers", "raw_layers")
    return frozenset(layers[i] for i in spec.raw_layers)


def _blocks(
    spec: PipelineSpec, kv: KVSpec, group: LayerGroup, shard: Shard, chain: ChainTraits
) -> Iterator[tuple[int, ...]]:
    raw, mine = _raw_layers(spec, kv), set(shard.layers)
    size = spec.layer_block
    for i in range(0, len(group.layers), size):
        block = group.layers[i : i + size]
        held = [layer for layer in block if layer in mine]
        if held and len(held) < len(block) and not chain.layer_local:
            raise UnsupportedSpecError(
                f"layers {block} form one block, this rank holds {held}; choose a 'layer_block' that divides the"
                " layers of a pipeline stage",
                "layer_block",
            )
        for kind in (False, True):
            if part := tuple(layer for layer in held if (layer in raw) is kind):
                yield part


def _head_groups(spec: PipelineSpec, plane: PlaneSpec, shard: Shard, chain: ChainTraits) -> Iterator[tuple[int, ...]]:
    count = spec.head_groups or (plane.num_heads if chain.head_local else 1)
    count = min(count, plane.num_heads)
    if plane.num_heads % count:
        raise UnsupportedSpecError(f"{plane.num_heads} heads do not divide into {count} groups", "head_groups")
    each, mine = plane.num_heads // count, set(shard.heads(plane.num_heads))
    for i in range(count):
        heads = tuple(range(i * each, (i + 1) * each))
        held = mine.intersection(heads)
        if held and len(held) < each:
            raise UnsupportedSpecError(
                f"heads {heads} of plane {plane.name!r} form one group, this rank holds {sorted(held)}; use a"
                " head-local chain, more 'head_groups', or a smaller tensor-parallel size",
                "head_groups",
            )
        if held:
            yield heads


def plan(spec: PipelineSpec, lanes_: list[Lane], total: int, ready: range | None = None) -> Iterator[Planned]:
    """Segments of a request of ``total`` tokens whose cell became final within ``ready`` (default: all).

    Cells come first, so that a cell is sent as soon as it is final; state groups come with the last token.
    """
    ready = range(total) if ready is None else ready
    index = 0
    for cell in cells(range(total), spec.segment_tokens):
        wanted = cell[-1] in ready
        for lane in lanes_:
            for at, chain in _runs(spec, lane, cell, total):
                if wanted:
                    yield Planned(index, at, chain)
                index += 1


def _runs(spec: PipelineSpec, lane: Lane, cell: range, total: int) -> Iterator[tuple[Region, int]]:
    """The regions of one lane in one cell: sinks raw, the body, its ragged tail raw, the recent window raw."""
    if lane.group.unit == "state":
        if cell.stop == total:
            yield _region(lane, range(1)), lane.chain.id
        return
    start = max(cell.start, total - lane.group.window) if lane.group.window else cell.start
    raw_to = min(max(start, spec.sink_tokens), cell.stop)
    recent = max(min(cell.stop, total - spec.recent_tokens), raw_to)
    body = raw_to + (recent - raw_to) // lane.chain.token_multiple * lane.chain.token_multiple
    if lane.chain.id == RAW_CHAIN_ID:
        raw_to = body = start
    runs = ((range(start, raw_to), RAW_CHAIN_ID), (range(raw_to, body), lane.chain.id))
    for tokens, chain in (*runs, (range(body, cell.stop), RAW_CHAIN_ID)):
        if tokens:
            yield _region(lane, tokens), chain


def _region(lane: Lane, tokens: range) -> Region:
    return Region(lane.group.id, lane.plane.name, lane.layers, lane.heads, tokens.start, tokens.stop)


def check_size(spec: PipelineSpec, lane: Lane) -> None:
    """Refuse segments that no decoder takes.

    Raises:
        UnsupportedSpecError: more original bytes than a segment may hold.
    """
    tokens = 1 if lane.group.unit == "state" else spec.segment_tokens
    elements = len(lane.layers) * len(lane.heads) * tokens * lane.plane.dim
    if elements * lane.plane.dtype.itemsize > MAX_SEGMENT_BYTES:
        raise UnsupportedSpecError(
            f"a segment of plane {lane.plane.name!r} would hold {elements * lane.plane.dtype.itemsize} original bytes,"
            f" at most {MAX_SEGMENT_BYTES} are taken; use a smaller 'layer_block' or 'segment_tokens'",
            "layer_block",
        )
