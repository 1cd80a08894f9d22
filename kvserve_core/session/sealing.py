"""Segments as bytes with digests; bodies on a device are hashed there, those of a batch in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import Tensor

from kvserve_core.wire import Codebook, Sealed, Segment

Hasher: TypeAlias = Callable[[Sequence[Tensor]], Sequence[bytes]]
"""The hashes of each body's pieces (:meth:`kvserve_core.transport.Transport.piece_hashes`)."""


def seal_all(codebook: Codebook, segments: Sequence[Segment], hasher: Hasher) -> list[Sealed]:
    """What a source serves. The bodies are complete on return: reading their hashes waited for them."""
    on_device = [s.body for s in segments if isinstance(s.body, Tensor)]
    hashes = iter(hasher(on_device) if on_device else ())
    return [codebook.seal(s, next(hashes) if isinstance(s.body, Tensor) else None) for s in segments]
