"""What a transfer is on the wire: its segments as bytes, as a consumer reads them. And a library for tiny models."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvserve_core.handshake import peer_info
from kvserve_core.latency import Speed
from kvserve_core.library import Profile, ProfileLibrary, QualityRecord
from kvserve_core.model import kv_spec, model_id
from kvserve_core.profile import PipelineSpec
from kvserve_core.registry import default_registry
from kvserve_core.spec import DType, KVSpec, Region, whole
from kvserve_core.transport import Endpoint, Selection
from kvserve_core.wire import Codebook
from kvserve_vllm.params import TransferParams

Bytes = dict[tuple[Region, tuple[str, ...]], tuple[bytes, bytes]]
"""By place and chain: metadata and body."""
ROTATED = "rotated"
CHAIN = {
    "transforms": ["hadamard"],
    "quantizer": {"name": "uniform", "configuration": {"levels": 16, "axis": "token_head"}},
    "codec": "zstd",
}


def tiny_spec(folder: Path) -> KVSpec:
    """The cache of a model in float32."""
    from transformers import AutoConfig

    return kv_spec(AutoConfig.from_pretrained(folder).to_dict(), DType.F32, model_id(folder))


def rotated_library(folder: Path, target: Path) -> Path:
    """A library of one lossy profile, whose chain works head by head. Its figures are not measured."""
    spec = tiny_spec(folder)
    quality = {"default": QualityRecord(value=0.97, lower=0.96, upper=0.98, metric="none", samples=1)}
    pipeline = PipelineSpec.parse({"planes": {"*": CHAIN}})
    speed = Speed.of(1e9)
    profile = Profile(name=ROTATED, pipeline=pipeline, cr=4.0, encode=speed, decode=speed, quality=quality)
    made = ProfileLibrary(
        model_id=spec.model_id, fingerprint=spec.fingerprint, device="cpu", created="now", profiles=(profile,)
    )
    made.save(target)
    return target


def segments(kv: KVSpec, params: Mapping[str, Any]) -> Bytes:
    """All segments of an offer, whose producers are told afterwards that nobody needs it any more."""
    locator = TransferParams.parse(params).locator
    assert locator is not None
    registry = default_registry()
    peer, found = peer_info(kv, whole(kv), registry), Bytes()
    transport = registry.create("transport", "tcp")
    try:
        for endpoint in locator.endpoints:
            want = Selection(held_by(kv, endpoint, locator.num_tokens), peer)
            delivery = transport.fetch(endpoint.address, locator.transfer_id, want, time.monotonic() + 60)
            codebook, chains = Codebook(delivery.header), delivery.header.chains
            for sealed in delivery:
                segment = codebook.unseal(sealed)
                at = (segment.at, tuple(chains[segment.chain].stages))
                found[at] = (bytes(segment.meta), bytes(segment.body))
            delivery.close()
            transport.release(endpoint.address, locator.transfer_id, (0, 1), None)
    finally:
        transport.close()
    return found


def held_by(kv: KVSpec, endpoint: Endpoint, total: int) -> tuple[Region, ...]:
    """Everything of a prompt that a rank holds."""
    shard = endpoint.shard
    return tuple(
        Region(group.id, plane.name, group.layers, shard.heads(plane.num_heads), 0, total)
        for group in kv.groups
        for plane in group.planes
    )
