"""A codec, as short as one can be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from kvserve_core.component import Capabilities, ComponentConfig, Tunable
from kvserve_core.stages import Codec
from kvserve_core.tensor import Encoded, Part


class RunLength(Codec):
    """Run-length codes.

    Runs of up to ``longest`` equal codes become a length byte and a value byte.
    """

    class Config(ComponentConfig):
        """Fields of each sort that a listing shows."""

        longest: int = Tunable(255, low=2, high=255, log=True, ge=2, le=255, description="longest run")
        order: Literal["row", "column"] = "row"
        table: str | None = None
        label: str = Field(min_length=1)

    caps = Capabilities(exact=True, head_local=True)
    config: Config

    def bound(self, part: Part) -> int:
        """Two bytes a code."""
        return 2 * part.nbytes

    def encode(self, parts: Sequence[Part]) -> Sequence[Encoded]:
        """Each part by itself."""
        return [_encoded(part.codes, self.config.longest) for part in parts]

    def decode(self, blobs: Sequence[Encoded], like: Sequence[Part]) -> Sequence[Tensor]:
        """Lengths repeat values."""
        pairs = [blob.data[: int(blob.nbytes)].view(-1, 2) for blob in blobs]
        return [
            p[:, 1].repeat_interleave(p[:, 0].long()).view(part.codes.shape)
            for p, part in zip(pairs, like, strict=True)
        ]


def _encoded(codes: Tensor, longest: int) -> Encoded:
    values, counts = torch.unique_consecutive(codes, return_counts=True)
    out = []
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        out += [[min(longest, count - done), value] for done in range(0, count, longest)]
    data = torch.tensor(out, dtype=torch.uint8).flatten()
    return Encoded(data, torch.tensor(data.numel()))
