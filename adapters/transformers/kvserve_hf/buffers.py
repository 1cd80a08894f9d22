"""KV of one request, held by plane: what the engine exports from and injects into."""

from __future__ import annotations

import torch
from torch import Tensor

from kvserve_core.errors import KVServeError, UnsupportedSpecError
from kvserve_core.spec import COMPOSITE, KVSpec, LayerGroup, Region
from kvserve_core.tensor import TORCH


class KVBuffer:
    """Tensors ``[L, H, T, D]`` per layer group and plane, and which (layer, head, token) have been written.

    All tokens of a windowed group are kept, so that any region can be read; a decode needs only its window.
    """

    def __init__(self, spec: KVSpec, num_tokens: int) -> None:
        self.spec, self.num_tokens = spec, num_tokens
        self._x: dict[tuple[int, str], Tensor] = {}
        self._filled: dict[tuple[int, str], Tensor] = {}
        for group in spec.groups:
            for plane in group.planes:
                shape = (len(group.layers), plane.num_heads, num_tokens)
                self._x[group.id, plane.name] = torch.zeros(*shape, plane.dim, dtype=TORCH[plane.dtype])
                self._filled[group.id, plane.name] = torch.zeros(shape, dtype=torch.bool)
        self._at = {layer: (g, row) for g in spec.groups for row, layer in enumerate(g.layers)}

    def read(self, at: Region) -> Tensor:
        """A copy of a region, ``[len(layers), len(heads), num_tokens, D]``.

        Raises:
            KVServeError: some of it has not been computed or has not arrived.
        """
        if at.plane in COMPOSITE:
            return torch.cat([self.read(part) for part in _members(at)], dim=-1)
        rows, heads, tokens = self._index(at)
        key = (at.group, at.plane)
        if not bool(self._filled[key][rows, heads, tokens].all()):
            raise KVServeError(f"KV of {at} is not complete; read tokens only after they were announced as ready")
        return self._x[key][rows, heads, tokens].contiguous()

    def write(self, at: Region, x: Tensor) -> None:
        """Store ``x`` (shape and dtype of the region) at ``at``.

        Raises:
            UnsupportedSpecError: another shape or dtype than the plane's.
        """
        plane = self.spec.group(at.group).plane(at.plane)
        shape = (len(at.layers), len(at.heads), at.num_tokens, plane.dim)
        if tuple(x.shape) != shape or x.dtype != TORCH[plane.dtype]:
            raise UnsupportedSpecError(f"{at} takes {shape} of {plane.dtype}, got {tuple(x.shape)} of {x.dtype}")
        if at.plane in COMPOSITE:
            sizes = [part.dim for part in plane.parts]
            for part, piece in zip(_members(at), torch.split(x, sizes, dim=-1), strict=True):
                self.write(part, piece)
            return
        rows, heads, tokens = self._index(at)
        self._x[at.group, at.plane][rows, heads, tokens] = x
        self._filled[at.group, at.plane][rows, heads, tokens] = True

    def record(self, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        """Store K and V ``[H, t, D]`` of one layer from token ``start``; tokens past the end are not kept."""
        group, row = self._at[layer]
        stop = min(start + k.shape[1], self.num_tokens)
        for name, x in (("k", k), ("v", v)):
            if start < stop:
                self._x[group.id, name][row, :, start:stop] = x[:, : stop - start]
                self._filled[group.id, name][row, :, start:stop] = True

    def layer(self, layer: int) -> tuple[Tensor, Tensor, int]:
        """K and V ``[H, t, D]`` that decoding token ``num_tokens`` attends to, and the first of these tokens.

        Raises:
            KVServeError: some of it did not arrive; decoding must not go on.
        """
        group, row = self._at[layer]
        start = first_needed(group, self.num_tokens)
        for name in ("k", "v"):
            if not bool(self._filled[group.id, name][row, :, start:].all()):
                raise KVServeError(
                    f"plane {name!r} of layer {layer} lacks tokens in {start}-{self.num_tokens}; fetch them or"
                    " prefill again before decoding"
                )
        return self._x[group.id, "k"][row, :, start:], self._x[group.id, "v"][row, :, start:], start

    def _index(self, at: Region) -> tuple[Tensor, Tensor, slice]:
        if not 0 <= at.start <= at.stop <= self.num_tokens:
            raise UnsupportedSpecError(f"{at} reaches outside the {self.num_tokens} tokens held")
        group = self.spec.group(at.group)
        plane = group.plane(at.plane)
        if not set(at.layers) <= set(group.layers) or not all(0 <= h < plane.num_heads for h in at.heads):
            raise UnsupportedSpecError(f"{at} names layers or heads that group {group.id} does not have")
        rows = torch.tensor([group.layers.index(layer) for layer in at.layers])
        return rows[:, None], torch.tensor(at.heads)[None, :], slice(at.start, at.stop)


def first_needed(group: LayerGroup, num_tokens: int) -> int:
    """The first token that a query at position ``num_tokens`` sees: a window counts the query itself."""
    return max(0, num_tokens - group.window + 1) if group.window else 0


def _members(at: Region) -> list[Region]:
    return [Region(at.group, name, at.layers, at.heads, at.start, at.stop) for name in COMPOSITE[at.plane]]
