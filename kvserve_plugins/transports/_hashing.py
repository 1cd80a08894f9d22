"""Piece hashes of bodies on a GPU, by a kernel there."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from kvserve_core.transport import Transport

log = logging.getLogger(__name__)


class HashesOnDevice(Transport):
    """A transport whose bodies are hashed where they lie, whether they then leave the device or not.

    Where the kernel does not run (no Triton, or none that fits), the host hashes a copy of them instead.
    """

    hashes_on_device: ClassVar[bool] = True
    _kernel_failed: ClassVar[bool] = False

    def piece_hashes(self, bodies: Sequence[Tensor]) -> Sequence[bytes]:
        """On the GPU, all in one launch."""
        if HashesOnDevice._kernel_failed:
            return super().piece_hashes(bodies)
        try:
            from kvserve_plugins.kernels.digest import piece_hashes  # NumPy and xxhash; Triton with the first launch

            return piece_hashes(bodies)
        except (ValueError, torch.OutOfMemoryError):  # of these bodies, not of the kernel
            raise
        except Exception as error:  # noqa: BLE001  # Triton's own errors have no base of their own
            log.warning("segments are hashed on the host, the kernel failed: %s: %s", type(error).__name__, error)
            HashesOnDevice._kernel_failed = True
            return super().piece_hashes(bodies)
