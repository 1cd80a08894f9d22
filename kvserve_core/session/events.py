"""What an adapter implements (Gather, Scatter), and what a session tells it when polled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvserve_core.policy import Outcome
from kvserve_core.spec import COMPOSITE, KVSpec, Region


class Gather(Protocol):
    """Read a region of a request's cache out of the engine's blocks. Called from the session's encode thread."""

    def __call__(self, transfer_id: str, at: Region) -> Tensor:
        """``[L, H, T, D]`` in the plane's dtype; ``at.plane`` is a plane of the KVSpec, never a composite."""


class Scatter(Protocol):
    """Write a region into the engine's blocks. Called from the session's fetch threads, once per region."""

    def __call__(self, transfer_id: str, at: Region, x: Tensor) -> None:
        """``x`` is ``[L, H, T, D]`` in the plane's dtype, verified and decoded."""


class Event(Protocol):
    """A fence such as ``torch.cuda.Event``: the tokens are written when it has fired."""

    def synchronize(self) -> None:
        """Wait until it has fired."""


@dataclass(frozen=True)
class Freed:
    """Producer: the engine's blocks may be overwritten. Exactly one for every transfer that was opened."""

    transfer_id: str


@dataclass(frozen=True)
class Failed:
    """Producer: the transfer ended without being delivered (instead of an Outcome)."""

    transfer_id: str
    reason: str


@dataclass(frozen=True)
class Loaded:
    """Consumer: all tokens asked for are in place."""

    transfer_id: str
    tokens: range
    outcome: Outcome


@dataclass(frozen=True)
class LoadFailed:
    """Consumer: the rest must be recomputed. ``valid``: tokens that did arrive, from the first one asked for."""

    transfer_id: str
    tokens: range
    valid: range
    error: Exception
    outcome: Outcome


def gather_region(gather: Gather, transfer_id: str, at: Region) -> Tensor:
    """A region of any plane; composites are put together along D."""
    members = COMPOSITE.get(at.plane)
    if members is None:
        return gather(transfer_id, at)
    return torch.cat([gather(transfer_id, _with_plane(at, m)) for m in members], dim=-1)


def split_region(kv: KVSpec, at: Region, x: Tensor) -> list[tuple[Region, Tensor]]:
    """The inverse: a decoded composite as its planes."""
    members = COMPOSITE.get(at.plane)
    if members is None:
        return [(at, x)]
    group = kv.group(at.group)
    pieces = torch.split(x, [group.plane(m).dim for m in members], dim=-1)
    return [(_with_plane(at, m), piece) for m, piece in zip(members, pieces, strict=True)]


def _with_plane(at: Region, plane: str) -> Region:
    return Region(at.group, plane, at.layers, at.heads, at.start, at.stop)
