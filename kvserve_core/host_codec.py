"""A codec of the CPU in a chain on a GPU: codes are copied to the host for it and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvserve_core.component import Kind
from kvserve_core.stages import Codec
from kvserve_core.tensor import Encoded, Part


def runs_on(kind: Kind, on: frozenset[str], device: str) -> bool:
    """Whether a stage that runs on the devices ``on`` can be part of a chain on ``device``."""
    return device in on or (kind == "codec" and "cpu" in on)


class HostCodec(Codec):
    """Wraps a bound codec. ``encode`` waits for the codes to arrive on the host; a device codec would not."""

    def __init__(self, codec: Codec, device: torch.device) -> None:
        super().__init__(codec.config)
        self._codec, self._device = codec, device

    def bound(self, part: Part) -> int:
        """That of the wrapped codec."""
        return self._codec.bound(part)

    def encode(self, parts: Sequence[Part]) -> Sequence[Encoded]:
        """Encoded on the host, and left there: a host transport takes it from there."""
        return self._codec.encode([replace(part, codes=part.codes.cpu()) for part in parts])

    def decode(self, blobs: Sequence[Encoded], like: Sequence[Part]) -> Sequence[Tensor]:
        """Codes on the device."""
        on_host = [Encoded(blob.data.cpu(), blob.nbytes.cpu()) for blob in blobs]
        return [codes.to(self._device, non_blocking=True) for codes in self._codec.decode(on_host, like)]
