"""What one side of a transfer says of itself, and whether it can read what the other emits. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from kvserve_core.spec import Shard


class PeerInfo(msgspec.Struct, frozen=True):
    """A consumer, as sent with each selection.

    wire: lowest and highest frame version it reads. reads: ``{"codec:zstd": (1,)}``, format versions by stage.
    fingerprint: of its KVSpec. artefacts: hashes it holds. link: the name under which the producer keeps its goodput.
    """

    wire: tuple[int, int]
    reads: dict[str, tuple[int, ...]]
    device: str
    fingerprint: str
    shard: Shard
    artefacts: frozenset[str] = frozenset()
    link: str = "default"


class Refusal(msgspec.Struct, frozen=True):
    """Why a peer cannot decode something: the stages or hashes it lacks."""

    stages: tuple[str, ...]
    detail: str


def acceptable(chains: Sequence[Sequence[str]], artefacts: Collection[str], peer: PeerInfo) -> Refusal | None:
    """None when ``peer`` can decode every stage (``"codec:zstd@1"``) of every chain, else what it lacks."""
    missing = [stage for chain in chains for stage in chain if not _reads(stage, peer)]
    if missing:
        return Refusal(tuple(dict.fromkeys(missing)), "no installed component decodes these format versions")
    absent = sorted(set(artefacts) - peer.artefacts)
    if absent:
        return Refusal(tuple(f"artefact:{a[:16]}" for a in absent), "the loaded library does not hold these artefacts")
    return None


def _reads(stage: str, peer: PeerInfo) -> bool:
    name, _, version = stage.rpartition("@")
    return version.isdigit() and int(version) in peer.reads.get(name, ())
