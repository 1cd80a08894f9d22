"""Piece hashes of bodies on a GPU, by a kernel there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from kvserve_core.transport import Transport


class HashesOnDevice(Transport):
    """A transport whose bodies are hashed where they lie, whether they then leave the device or not."""

    hashes_on_device: ClassVar[bool] = True

    def piece_hashes(self, bodies: Sequence[Tensor]) -> Sequence[bytes]:
        """On the GPU, all in one launch."""
        from kvserve_plugins.kernels.digest import piece_hashes  # NumPy and xxhash; Triton with the first launch

        return piece_hashes(bodies)
