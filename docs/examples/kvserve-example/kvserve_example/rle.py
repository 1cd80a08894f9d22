"""Run-length coding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvserve_core import Capabilities, Codec, ComponentConfig, Encoded, Part
from kvserve_core.component import ANY
from kvserve_core.errors import FrameError

LONGEST = 256


class RunLength(Codec):
    """Run-length codes: a value and how often it is repeated.

    For n runs: n values of one byte (two, little-endian, for i16 codes), then n bytes of length - 1. Runs are at most
    256 long. It pays where neighbours are equal: sparse or one-bit codes.
    """

    class Config(ComponentConfig):
        """Nothing to set."""

    config: Config
    caps = Capabilities(exact=True, planes=ANY, head_local=True, max_alphabet=2**15)

    def bound(self, part: Part) -> int:
        """Every code a run of its own."""
        return part.codes.numel() * (part.codes.element_size() + 1)

    def encode(self, parts: Sequence[Part]) -> Sequence[Encoded]:
        """Each part by itself."""
        return [_encoded(part.codes) for part in parts]

    def decode(self, blobs: Sequence[Encoded], like: Sequence[Part]) -> Sequence[Tensor]:
        """The codes again.

        Raises:
            FrameError: the runs do not add up to the length expected. It is checked before anything is allocated.
        """
        return [_decoded(blob.data[: int(blob.nbytes)], part) for blob, part in zip(blobs, like, strict=True)]


def _encoded(codes: Tensor) -> Encoded:
    values, counts = torch.unique_consecutive(codes, return_counts=True)
    pieces = (counts + LONGEST - 1) // LONGEST
    lengths = torch.full((int(pieces.sum()),), LONGEST)
    lengths[pieces.cumsum(0) - 1] = counts - (pieces - 1) * LONGEST
    data = torch.cat((values.repeat_interleave(pieces).view(torch.uint8), (lengths - 1).to(torch.uint8)))
    return Encoded(data, torch.tensor(data.numel()))


def _decoded(data: Tensor, part: Part) -> Tensor:
    width = part.codes.element_size()
    runs, rest = divmod(data.numel(), width + 1)
    lengths = data[runs * width :].long() + 1
    if rest or int(lengths.sum()) != part.codes.numel():
        raise FrameError(f"codec 'example.rle' got {int(lengths.sum())} codes, expected {part.codes.numel()}")
    values = data[: runs * width].clone().view(part.codes.dtype)  # the bytes may lie at an odd address
    return values.repeat_interleave(lengths)
