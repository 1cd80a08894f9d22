"""A paged engine without a model: blocks, block tables, tensor-parallel ranks. It drives Producer and Consumer.

It is the contract that both engine adapters fill: Gather and Scatter over blocks, ``ready`` as chunks finish, events
when polled. KV values come from an integer recipe over the global address, so every rank of every layout agrees.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvserve_core.policy import Decision, ServiceContext
from kvserve_core.spec import DType, KVSpec, LayerGroup, PlanePart, PlaneSpec, Region, Shard
from kvserve_core.tensor import TORCH

STALE = 7.0
"""What fills slots that no token was written to: it must never travel."""


def dense(layers: int = 4, heads: int = 2, dim: int = 32, window: int | None = None) -> KVSpec:
    """A GQA model."""
    group = LayerGroup(0, tuple(range(layers)), _kv_planes(heads, dim), window)
    return KVSpec("fake-dense", (group,))


def mla(layers: int = 4, latent: int = 64, rope: int = 16) -> KVSpec:
    """A model with multi-head latent attention."""
    planes = (
        PlaneSpec("latent", 1, (PlanePart("latent", latent),), DType.BF16),
        PlaneSpec("rope", 1, (PlanePart("rope", rope),), DType.BF16),
    )
    return KVSpec("fake-mla", (LayerGroup(0, tuple(range(layers)), planes),))


def hybrid(heads: int = 2, dim: int = 32) -> KVSpec:
    """Full attention on even layers, a sliding window of 100 tokens on odd ones, and a state cell."""
    state = PlaneSpec("opaque", 1, (PlanePart("opaque", 96),), DType.U8)
    return KVSpec(
        "fake-hybrid",
        (
            LayerGroup(0, (0, 2, 4), _kv_planes(heads, dim)),
            LayerGroup(1, (1, 3), _kv_planes(heads, dim), window=100),
            LayerGroup(2, (5,), (state,), unit="state"),
        ),
    )


def _kv_planes(heads: int, dim: int) -> tuple[PlaneSpec, ...]:
    return tuple(PlaneSpec(name, heads, (PlanePart(name, dim),), DType.BF16) for name in ("k", "v"))


def truth(kv: KVSpec, at: Region) -> Tensor:
    """``[L, H, T, D]``: the value every rank computes for a region."""
    plane = kv.group(at.group).plane(at.plane)
    seed = 1 + sum(map(ord, at.plane)) + 31 * at.group
    layer = torch.tensor(at.layers).view(-1, 1, 1, 1)
    head = torch.tensor(at.heads).view(1, -1, 1, 1)
    token = torch.arange(at.start, at.stop).view(1, 1, -1, 1)
    dim = torch.arange(plane.dim).view(1, 1, 1, -1)
    mixed = (layer * 7919 + head * 104729 + token * 1299709 + dim * 15485863 + seed * 32452843) % 65521
    mixed = (mixed * mixed * 31 + mixed * 17 + seed) % 65521
    if not plane.dtype.is_float:
        return (mixed % 256).to(TORCH[plane.dtype])
    return ((mixed.float() / 65521 - 0.5) * 4).to(TORCH[plane.dtype])


@dataclass
class FakeEngine:
    """One worker rank. ``caches[group][plane][layer]`` is ``[num_blocks, block_size, heads of this rank, D]``."""

    kv: KVSpec
    shard: Shard
    block_size: int = 16
    num_blocks: int = 256
    caches: dict[tuple[int, str, int], Tensor] = field(default_factory=dict)
    tables: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    writes: list[Region] = field(default_factory=list)
    _next: int = 0

    def __post_init__(self) -> None:
        for group in self.kv.groups:
            size = 1 if group.unit == "state" else self.block_size
            for plane in group.planes:
                shape = (self.num_blocks, size, len(self.shard.heads(plane.num_heads)), plane.dim)
                for layer in set(group.layers) & set(self.shard.layers):
                    stale = torch.full(shape, STALE).to(TORCH[plane.dtype])
                    self.caches[group.id, plane.name, layer] = stale

    def allocate(self, transfer_id: str, total: int) -> None:
        """Blocks for a request, scattered over the pool as a real allocator leaves them, and no other's until all of
        the pool was given out."""
        for group in self.kv.groups:
            count = 1 if group.unit == "state" else -(-total // self.block_size)
            blocks = [5 * (self._next + i) % self.num_blocks for i in range(count)]
            self._next += count
            if len(set(blocks)) < count:
                raise RuntimeError("the fake pool is too small for this test")
            self.tables[transfer_id, group.id] = blocks

    def prefill(self, transfer_id: str, tokens: range) -> None:
        """Write the KV of ``tokens``, as a prefill step does."""
        for group in self.kv.groups:
            span = range(1) if group.unit == "state" else tokens
            for plane in group.planes:
                at = self.region(group, plane, span)
                if at.layers:
                    self._write(transfer_id, at, truth(self.kv, at))

    def region(self, group: LayerGroup, plane: PlaneSpec, tokens: range) -> Region:
        """This rank's part of a plane."""
        layers = tuple(sorted(set(group.layers) & set(self.shard.layers)))
        return Region(group.id, plane.name, layers, self.shard.heads(plane.num_heads), tokens.start, tokens.stop)

    def gather(self, transfer_id: str, at: Region) -> Tensor:
        """Gather: a region out of the blocks."""
        rows = self._slots(transfer_id, at)
        heads = [self._heads(at).index(h) for h in at.heads]
        layers = [self.caches[at.group, at.plane, layer].flatten(0, 1)[rows][:, heads] for layer in at.layers]
        return torch.stack(layers).transpose(1, 2).contiguous()

    def scatter(self, transfer_id: str, at: Region, x: Tensor) -> None:
        """Scatter: a decoded region into the blocks."""
        self.writes.append(at)
        self._write(transfer_id, at, x)

    def _write(self, transfer_id: str, at: Region, x: Tensor) -> None:
        rows = self._slots(transfer_id, at)
        heads = [self._heads(at).index(h) for h in at.heads]
        for i, layer in enumerate(at.layers):
            flat = self.caches[at.group, at.plane, layer].flatten(0, 1)
            flat[rows[:, None], torch.tensor(heads)[None, :]] = x[i].transpose(0, 1)

    def _heads(self, at: Region) -> tuple[int, ...]:
        return self.shard.heads(self.kv.group(at.group).plane(at.plane).num_heads)

    def _slots(self, transfer_id: str, at: Region) -> Tensor:
        size = 1 if self.kv.group(at.group).unit == "state" else self.block_size
        table = torch.tensor(self.tables[transfer_id, at.group])
        token = torch.arange(at.start, at.stop)
        return table[token // size] * size + token % size

    def holds(self, transfer_id: str, tokens: range, total: int) -> bool:
        """Whether this rank's blocks hold exactly the true values of ``tokens`` (within the windows)."""
        return all(torch.equal(*pair) for pair in self.pairs(transfer_id, tokens, total))

    def pairs(self, transfer_id: str, tokens: range, total: int) -> list[tuple[Tensor, Tensor]]:
        """(held, true) for every plane."""
        out = []
        for group in self.kv.groups:
            start = max(tokens.start, total - group.window) if group.window else tokens.start
            span = range(1) if group.unit == "state" else range(start, tokens.stop)
            for plane in group.planes:
                at = self.region(group, plane, span)
                if at.layers:
                    out.append((self.gather(transfer_id, at), truth(self.kv, at)))
        return out


def decision(profile: str) -> Decision:
    """A decision as a controller would make it."""
    return Decision(profile, "test", ServiceContext(nbytes=0), bandwidth=1e9)


def collect(
    poll: Callable[[], Sequence[object]], kind: type | tuple[type, ...], count: int, seconds: float = 20.0
) -> list[object]:
    """The next ``count`` events of a kind from ``poll``; events of other kinds are dropped."""
    found: list[object] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found += [event for event in poll() if isinstance(event, kind)]
        if len(found) >= count:
            return found
        time.sleep(0.002)
    raise AssertionError(f"{len(found)} of {count} events {kind} within {seconds} s")


def wait_for(poll: Callable[[], Sequence[object]], kind: type | tuple[type, ...], seconds: float = 20.0) -> object:
    """The next event of a kind from ``poll``."""
    return collect(poll, kind, 1, seconds)[0]
