"""Two classes of heads or layers: each class goes through its own quantizer in rectangles of layers times heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvserve_core.artefacts import Artefacts
from kvserve_core.errors import FrameError
from kvserve_core.spec import KVSpec, Region
from kvserve_core.stages import Quantizer
from kvserve_core.tensor import TORCH, Params, Part, Quantized
from kvserve_plugins.kernels.fused_launch import Stream
from kvserve_plugins.kernels.ranking import rectangles
from kvserve_plugins.kernels.shapes import shape_of

HIGH, LOW = "high", "low"
"""The classes: what their parameters' names begin with."""
Place = tuple[Region, KVSpec, torch.device, Artefacts]
"""What ``bind`` is given."""


@dataclass(frozen=True)
class Piece:
    """Layers times heads of one class: positions in the segment, the bound quantizer, and how many streams it gives."""

    prefix: str
    rows: slice
    columns: Tensor
    at: Region
    quantizer: Quantizer
    streams: int

    def where(self, at: Region) -> Region:
        """This piece's region at the tokens of ``at``."""
        return replace(self.at, start=at.start, stop=at.stop)


class HeadClasses:
    """Splits a segment by a table of low heads, ``[L, H]`` of this segment. Streams come class by class, high first."""

    def __init__(
        self, low: NDArray[np.bool_], quantizers: tuple[Quantizer, Quantizer], dtype: torch.dtype, place: Place
    ) -> None:
        self._dtype, self._device = dtype, place[2]
        self.pieces = tuple(
            _piece(f"{name}.{i}.", rows, columns, quantizer, place)
            for name, quantizer, chosen in ((HIGH, quantizers[0], ~low), (LOW, quantizers[1], low))
            for i, (rows, columns) in enumerate(rectangles(chosen))
        )

    def streams(self, at: Region, levels: Mapping[str, int]) -> tuple[Stream, ...]:
        """The streams of a place, for a kernel; ``levels`` of each class."""
        return tuple(
            Stream(
                piece.prefix,
                tuple(at.layers.index(layer) for layer in piece.at.layers),
                tuple(at.heads.index(head) for head in piece.at.heads),
                levels[piece.prefix.partition(".")[0]],
            )
            for piece in self.pieces
        )

    def encode(self, x: Tensor, at: Region) -> Quantized:
        """``[L, H, T, D]`` to the streams of each class. Raises what the inner quantizers raise."""
        parts: list[Part] = []
        params: dict[str, Tensor] = {}
        for piece in self.pieces:
            q = piece.quantizer.encode(x[piece.rows].index_select(1, piece.columns), piece.where(at))
            parts += q.parts
            params |= prefixed(piece.prefix, q.params)
        return Quantized(tuple(parts), params, shape_of(x))

    def decode(self, q: Quantized, at: Region) -> Tensor:
        """``[L, H, T, D]`` in f32, or the plane's dtype if both quantizers are exact."""
        require_streams(q, sum(piece.streams for piece in self.pieces), at)
        x = torch.empty(q.shape, dtype=self._dtype, device=self._device)
        parts = iter(q.parts)
        for piece in self.pieces:
            shape = (len(piece.at.layers), len(piece.at.heads), *q.shape[2:])
            inner = Quantized(tuple(islice(parts, piece.streams)), under(piece.prefix, q.params), shape)
            values = piece.quantizer.decode(inner, piece.where(at)).to(self._dtype)
            x[piece.rows].index_copy_(1, piece.columns, values)
        return x


def _piece(prefix: str, rows: tuple[int, ...], columns: tuple[int, ...], quantizer: Quantizer, place: Place) -> Piece:
    at, spec, device, artefacts = place
    sub = replace(at, layers=tuple(at.layers[r] for r in rows), heads=tuple(at.heads[c] for c in columns))
    bound, streams = bound_with_streams(quantizer, (sub, spec, device, artefacts))
    return Piece(prefix, slice(rows[0], rows[-1] + 1), torch.tensor(columns, device=device), sub, bound, streams)


def bound_with_streams(quantizer: Quantizer, place: Place) -> tuple[Quantizer, int]:
    """The quantizer bound to a place, and how many streams it gives there for any number of tokens."""
    at, spec, device, _ = place
    bound = quantizer.bind(*place)
    plane = spec.group(at.group).plane(at.plane)
    nothing = torch.empty((len(at.layers), len(at.heads), 0, plane.dim), dtype=TORCH[plane.dtype], device=device)
    return bound, len(bound.encode(nothing, replace(at, stop=at.start)).parts)


def require_streams(q: Quantized, expected: int, at: Region) -> None:
    """Refuse a frame with another number of streams."""
    if len(q.parts) != expected:
        raise FrameError(f"{len(q.parts)} streams, the classes here have {expected}", at)


def prefixed(prefix: str, params: Params) -> dict[str, Tensor]:
    """Parameters of a class under its own names."""
    return {prefix + name: value for name, value in params.items()}


def under(prefix: str, params: Params) -> dict[str, Tensor]:
    """The inverse of :func:`prefixed`: those of one class."""
    return {name.removeprefix(prefix): value for name, value in params.items() if name.startswith(prefix)}
