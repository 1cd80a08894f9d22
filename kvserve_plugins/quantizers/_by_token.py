"""Two classes of tokens: each class of every layer and head goes through its own quantizer."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from kvserve_core.errors import FrameError
from kvserve_core.spec import Region
from kvserve_core.stages import Quantizer
from kvserve_core.tensor import Params, Quantized
from kvserve_plugins.kernels.norms import root_mean_square
from kvserve_plugins.kernels.ranking import low_count
from kvserve_plugins.kernels.shapes import require_shape, shape_of
from kvserve_plugins.kernels.token_classes import as_bits, from_bits, largest, order
from kvserve_plugins.quantizers._by_head import Place, bound_with_streams, prefixed, require_streams, under

TokenScore = Literal["position", "low_norm", "high_norm"]
BITS = "low_tokens"


class TokenClasses:
    """Splits a segment along tokens. Streams come class by class, high first; tokens of a class keep their order."""

    def __init__(
        self,
        score: TokenScore,
        low_ratio: float,
        precise_tokens: int,
        quantizers: tuple[Quantizer, Quantizer],
        dtype: torch.dtype,
        place: Place,
    ) -> None:
        self._score, self._ratio, self._precise = score, low_ratio, precise_tokens
        self._dtype, self._device = dtype, place[2]
        self._high, self._high_streams = bound_with_streams(quantizers[0], place)
        self._low, self._low_streams = bound_with_streams(quantizers[1], place)

    def encode(self, x: Tensor, at: Region) -> Quantized:
        """``[L, H, T, D]`` to the streams of each class. Raises what the inner quantizers raise."""
        params: dict[str, Tensor] = {}
        if self._score == "position":
            low = self._by_position(x.shape, at)
        else:
            low = largest(self._scores(x), self._low_count(at))
            params[BITS] = as_bits(low)
        index = order(low).unsqueeze(-1).expand(x.shape)
        high = at.num_tokens - self._low_count(at)
        first = self._high.encode(x.gather(2, index[:, :, :high]), _part(at, 0, high))
        second = self._low.encode(x.gather(2, index[:, :, high:]), _part(at, high, at.num_tokens))
        params |= prefixed("high.", first.params) | prefixed("low.", second.params)
        return Quantized((*first.parts, *second.parts), params, shape_of(x))

    def decode(self, q: Quantized, at: Region) -> Tensor:
        """``[L, H, T, D]`` in f32, or the plane's dtype if both quantizers are exact.

        Raises:
            FrameError: another number of streams, or bits for other tokens.
        """
        require_streams(q, self._high_streams + self._low_streams, at)
        low = self._by_position(q.shape, at) if self._score == "position" else self._from_bits(q, at)
        high = at.num_tokens - self._low_count(at)
        classes = (
            (self._high, q.parts[: self._high_streams], "high.", (0, high)),
            (self._low, q.parts[self._high_streams :], "low.", (high, at.num_tokens)),
        )
        values = [
            quantizer.decode(
                Quantized(parts, under(prefix, q.params), (*q.shape[:2], stop - start, q.shape[3])),
                _part(at, start, stop),
            ).to(self._dtype)
            for quantizer, parts, prefix, (start, stop) in classes
        ]
        x = torch.empty(q.shape, dtype=self._dtype, device=self._device)
        return x.scatter_(2, order(low).unsqueeze(-1).expand(q.shape), torch.cat(values, 2))

    def _low_count(self, at: Region) -> int:
        if self._score == "position":
            return at.num_tokens - min(max(self._precise - at.start, 0), at.num_tokens)
        return low_count(self._ratio, at.num_tokens)

    def _by_position(self, shape: tuple[int, ...], at: Region) -> Tensor:
        positions = torch.arange(at.start, at.start + shape[2], device=self._device)
        return (positions >= self._precise).expand(shape[:3])

    def _scores(self, x: Tensor) -> Tensor:
        """``[L, H, T]``, higher is coarser."""
        size = root_mean_square(x.to(torch.float32)).squeeze(-1)
        return size if self._score == "low_norm" else -size

    def _from_bits(self, q: Quantized, at: Region) -> Tensor:
        bits: Params = q.params
        require_shape(bits, (BITS,), (*q.shape[:2], -(-q.shape[2] // 8)), at)
        if bits[BITS].dtype != torch.uint8:
            raise FrameError(f"parameter {BITS!r} is of {bits[BITS].dtype}, due are bytes", at)
        return from_bits(bits[BITS], q.shape[2])


def _part(at: Region, start: int, stop: int) -> Region:
    """A region of as many tokens as a class has."""
    return replace(at, start=at.start + start, stop=at.start + stop)
