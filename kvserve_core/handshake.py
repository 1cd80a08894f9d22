"""What this side can decode, and which profiles a known peer can read."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvserve_core.artefacts import NONE, Artefacts
from kvserve_core.component import Kind
from kvserve_core.errors import UnavailableComponentError
from kvserve_core.host_codec import runs_on
from kvserve_core.peer import PeerInfo, Refusal, acceptable
from kvserve_core.pipeline import Pipeline
from kvserve_core.registry import Registry
from kvserve_core.spec import KVSpec, Shard
from kvserve_core.wire import READS

_STAGES: tuple[Kind, ...] = ("transform", "quantizer", "codec")


def peer_info(
    kv: KVSpec,
    shard: Shard,
    registry: Registry,
    artefacts: Artefacts = NONE,
    device: torch.device | None = None,
    link: str = "default",
) -> PeerInfo:
    """Everything this side can decode on ``device``; stages that cannot be imported here are left out."""
    on = device.type if device else "cpu"
    reads: dict[str, tuple[int, ...]] = {}
    for kind in _STAGES:
        for name in registry.names(kind):
            try:
                cls = registry.load(kind, name)
            except UnavailableComponentError:  # listed with its reason by list-components
                continue
            if runs_on(kind, cls.caps.decode_on, on):
                reads[f"{kind}:{name}"] = tuple(sorted(cls.reads))
    return PeerInfo(READS, reads, on, kv.fingerprint, shard, artefacts.hashes, link)


def warm_up(peer: PeerInfo, registry: Registry) -> None:
    """Let everything that this side may be sent make itself ready, so that no request waits for it."""
    for kind in _STAGES:
        for name in registry.names(kind):
            if f"{kind}:{name}" in peer.reads:
                registry.load(kind, name).warm_up()


def negotiate(pipelines: Mapping[str, Pipeline], peer: PeerInfo) -> dict[str, Refusal | None]:
    """For each profile None when ``peer`` can decode it, else what it lacks."""
    return {name: acceptable(p.chains, p.used_artefacts, peer) for name, p in pipelines.items()}
