"""SGLang's pools as lanes that are addressed by group, plane, layer and slot: the adapter's Gather and Scatter.

A lane is one layer of one plane: tensors ``[slots, heads of this rank, d]`` that stand side by side along D.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvserve_core.errors import UnsupportedSpecError
from kvserve_core.spec import KVSpec, Region, Shard
from kvserve_core.tensor import TORCH

Place = tuple[int, str, int]
"""Group, plane, layer."""
Lanes = Mapping[Place, tuple[Tensor, ...]]


@dataclass(frozen=True)
class Layout:
    """The lanes of one rank. device: where the sessions compute; a state or the auxiliary row may lie elsewhere."""

    kv: KVSpec
    shard: Shard
    lanes: Lanes
    device: torch.device

    def __post_init__(self) -> None:
        for place, tensors in self.lanes.items():
            _check(self.kv, self.shard, place, tensors)

    def gather(self, at: Region, slots: Tensor) -> Tensor:
        """``[L, H, T, D]`` of the tokens that lie in ``slots`` (one a token, int64)."""
        heads = self._heads(at)
        layers = [_read(self.lanes[at.group, at.plane, layer], slots, heads) for layer in at.layers]
        return torch.stack(layers).to(self.device)

    def scatter(self, at: Region, slots: Tensor, x: Tensor) -> None:
        """Write ``x`` ``[L, H, T, D]`` into ``slots``."""
        heads = self._heads(at)
        for layer, values in zip(at.layers, x, strict=True):
            _write(self.lanes[at.group, at.plane, layer], slots, heads, values)

    def _heads(self, at: Region) -> Tensor | None:
        """Places of the region's heads on this rank, None for all of them."""
        mine = self.shard.heads(self.kv.group(at.group).plane(at.plane).num_heads)
        if at.heads == mine:
            return None
        return torch.tensor([mine.index(head) for head in at.heads])


def _read(lane: tuple[Tensor, ...], slots: Tensor, heads: Tensor | None) -> Tensor:
    slots = slots.to(lane[0].device)
    rows = [tensor[slots] if heads is None else tensor[slots][:, heads] for tensor in lane]
    joined = rows[0] if len(rows) == 1 else torch.cat(rows, dim=-1)
    return joined.transpose(0, 1)


def _write(lane: tuple[Tensor, ...], slots: Tensor, heads: Tensor | None, values: Tensor) -> None:
    slots = slots.to(lane[0].device)
    pieces = torch.split(values.to(slots.device).transpose(0, 1), [tensor.shape[-1] for tensor in lane], dim=-1)
    for tensor, piece in zip(lane, pieces, strict=True):
        if heads is None:
            tensor[slots] = piece
        else:
            tensor[slots[:, None], heads[None, :].to(slots.device)] = piece


def _check(kv: KVSpec, shard: Shard, place: Place, tensors: tuple[Tensor, ...]) -> None:
    group, plane_name, layer = place
    plane = kv.group(group).plane(plane_name)
    expected = (len(shard.heads(plane.num_heads)), plane.dim, TORCH[plane.dtype])
    found = (tensors[0].shape[1], sum(t.shape[-1] for t in tensors), tensors[0].dtype)
    if found != expected:
        raise UnsupportedSpecError(
            f"SGLang's pool holds {found} (heads, dim, dtype) of plane {plane_name!r} in layer {layer}, the model's"
            f" config says {expected}; this model's cache is laid out in a way that kvserve does not know"
        )
