"""The codec that does nothing."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvserve_core.component import ANY, Capabilities, ComponentConfig
from kvserve_core.stages import Codec
from kvserve_core.tensor import Encoded, Part
from kvserve_plugins.kernels.bits import bytes_of, from_bytes
from kvserve_plugins.kernels.blobs import blob, exactly, payload


class Raw(Codec):
    """Sends codes as they stand.

    One byte a code for u8, two little-endian bytes for i16; no copy is made on either side.
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
        """The size of the codes."""
        return part.nbytes

    def encode(self, parts: Sequence[Part]) -> Sequence[Encoded]:
        """The codes' bytes."""
        return [blob(bytes_of(part.codes)) for part in parts]

    def decode(self, blobs: Sequence[Encoded], like: Sequence[Part]) -> Sequence[Tensor]:
        """The codes again.

        Raises:
            FrameError: another length.
        """
        return [
            from_bytes(exactly(payload(b), part.nbytes, "raw"), part.codes.dtype)
            for b, part in zip(blobs, like, strict=True)
        ]
