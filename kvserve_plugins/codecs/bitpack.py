"""Fixed-rate packing of codes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvserve_core.component import ANY, Capabilities, ComponentConfig
from kvserve_core.errors import FrameError
from kvserve_core.stages import Codec
from kvserve_core.tensor import Encoded, Part
from kvserve_plugins.kernels.blobs import blob, exactly, payload
from kvserve_plugins.kernels.radix import layout, pack, unpack


class Bitpack(Codec):
    """Packs codes at a fixed rate, in mixed radix where that is smaller than whole bits.

    The size follows from the number of codes and the alphabet alone, so a GPU never waits for it. The format, to the
    bit, is in :mod:`kvserve_plugins.kernels.radix`. Alphabets above 256 take two bytes a code where nothing is smaller.
    """

    class Config(ComponentConfig):
        """Nothing to set."""

    config: Config
    caps = Capabilities(
        exact=True,
        encode_on=frozenset({"cpu", "cuda"}),
        decode_on=frozenset({"cpu", "cuda"}),
        planes=ANY,
        head_local=True,
        max_alphabet=2**15,
    )

    def bound(self, part: Part) -> int:
        """The exact size."""
        return layout(part.alphabet).size(part.codes.numel())

    def encode(self, parts: Sequence[Part]) -> Sequence[Encoded]:
        """Packed codes; a code outside its alphabet would spoil its group."""
        return [blob(pack(part.codes, part.alphabet)) for part in parts]

    def decode(self, blobs: Sequence[Encoded], like: Sequence[Part]) -> Sequence[Tensor]:
        """The codes again.

        Raises:
            FrameError: another length, or bytes that ``encode`` never gives (on a device: its flag in ``ok`` is 0).
        """
        decoded = [self._decode(payload(b), part) for b, part in zip(blobs, like, strict=True)]
        self.ok = torch.stack([canonical for _, canonical in decoded]) if decoded else None
        if self.ok is not None and self.ok.device.type == "cpu" and not self.ok.all():
            bad = like[int(self.ok.to(torch.uint8).argmin())]
            raise FrameError(f"codec 'bitpack' got codes outside an alphabet of {bad.alphabet}")
        return [codes for codes, _ in decoded]

    def _decode(self, data: Tensor, part: Part) -> tuple[Tensor, Tensor]:
        exactly(data, self.bound(part), "bitpack")
        return unpack(data, part.codes.numel(), part.alphabet, part.codes.dtype)
