"""Plain values that cross between the scheduler's connector and the workers'. They are pickled with several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvserve_core.peer import PeerInfo
from kvserve_core.policy import Decision, Outcome
from kvserve_core.transport import Endpoint, Locator
from kvserve_vllm.prefix.meta import PrefixLoad, PrefixLoaded, PrefixStore, PrefixStored

Blocks = tuple[list[int], ...]
"""Block ids of a request, per KV cache group."""


@dataclass(frozen=True)
class Open:
    """Offer the first ``total`` tokens of a request under a transfer id."""

    req_id: str
    transfer_id: str
    total: int
    decision: Decision
    peer: PeerInfo | None
    blocks: Blocks


@dataclass(frozen=True)
class Load:
    """Fetch tokens ``[start, stop)`` into the blocks of a request. wait: before the forward pass of this step."""

    req_id: str
    locator: Locator
    start: int
    stop: int
    blocks: Blocks
    wait: bool


@dataclass
class StepMeta(KVConnectorMetadata):
    """What the workers are to do in one step, in this order.

    drop: requests whose blocks are lost or whose offer ends, with the reason. grow: blocks to append by request.
    ready: tokens ``[0, stop)`` are final once this step's forward pass is done. prefix_...: the same for a store.
    idle: no request computes anything in this step.
    """

    drop: dict[str, str] = field(default_factory=dict)
    cancel: list[str] = field(default_factory=list)
    release: list[Locator] = field(default_factory=list)
    open: list[Open] = field(default_factory=list)
    grow: dict[str, Blocks] = field(default_factory=dict)
    load: list[Load] = field(default_factory=list)
    ready: dict[str, int] = field(default_factory=dict)
    prefix_drop: list[str] = field(default_factory=list)
    prefix_cancel: list[str] = field(default_factory=list)
    prefix_load: list[PrefixLoad] = field(default_factory=list)
    prefix_store: list[PrefixStore] = field(default_factory=list)
    idle: bool = False


@dataclass(frozen=True)
class LoadEnd:
    """How a load ended on one rank. valid: tokens in place, from its start."""

    req_id: str
    transfer_id: str
    tokens: int
    valid: int
    reason: str = ""


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """What happened on the workers since the last step, each list over all ranks."""

    outcomes: list[Outcome] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    loads: list[LoadEnd] = field(default_factory=list)
    prefix_loaded: list[PrefixLoaded] = field(default_factory=list)
    prefix_stored: list[PrefixStored] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """This rank's and another's."""
        if not isinstance(other, WorkerReport):
            return self
        return WorkerReport(
            self.outcomes + other.outcomes,
            self.failed + other.failed,
            self.loads + other.loads,
            self.prefix_loaded + other.prefix_loaded,
            self.prefix_stored + other.prefix_stored,
        )

    @property
    def empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not (self.outcomes or self.failed or self.loads or self.prefix_loaded or self.prefix_stored)


@dataclass(frozen=True)
class Profile:
    """A profile that a rank can encode, as far as negotiation needs it."""

    chains: tuple[tuple[str, ...], ...]
    used_artefacts: frozenset[str]


@dataclass(frozen=True)
class RankInfo(KVConnectorHandshakeMetadata):
    """What a rank tells the scheduler once, at start-up.

    endpoint: None where nothing is offered. kv_scales: a digest of the scales of a quantized cache.
    """

    endpoint: Endpoint | None
    profiles: dict[str, Profile]
    peer: PeerInfo | None
    kv_scales: str | None = None


def common_profiles(ranks: Sequence[RankInfo]) -> dict[str, Profile]:
    """What every rank can encode: all of them send a prompt with one profile."""
    common = set.intersection(*(set(rank.profiles) for rank in ranks))
    return {name: profile for name, profile in ranks[0].profiles.items() if name in common}
