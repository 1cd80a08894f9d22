"""What the SGLang adapter makes of a model, and of KV that another engine published."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from hicache_servers import PAGE, settings
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.utils import get_hash_str
from torch import Tensor

from kvserve_core.deployment import Deployment
from kvserve_core.model import model_id
from kvserve_core.session import LoadFailed
from kvserve_core.settings import Settings
from kvserve_core.spec import KVSpec, Region, whole
from kvserve_core.transport import Locator
from kvserve_sglang.hicache_pages import HostPages
from kvserve_sglang.hicache_setup import Served, cache_of, page_spec
from kvserve_sglang.metrics import Exporter

FETCH_S = 60.0
Planes = dict[str, Tensor]
"""``[L, T, H, D]`` by plane, as SGLang's pools are."""


def served(model: Path) -> Served:
    """What a server of this model says of itself."""
    return Served(ModelConfig(str(model)).hf_text_config.to_dict(), model_id(model), "auto")


def fetch(kv: KVSpec, params: dict[str, Any]) -> Planes:
    """All tokens of an offer, through the session that decode servers use."""
    locator = msgspec.convert(params["kvserve"]["locator"], Locator)
    shard, group = whole(kv), kv.groups[0]
    sizes = {p.name: (len(group.layers), locator.num_tokens, p.num_heads, p.dim) for p in group.planes}
    planes = {name: torch.full(size, float("nan")) for name, size in sizes.items()}

    def scatter(transfer_id: str, at: Region, x: Tensor) -> None:
        del transfer_id
        for i, layer in enumerate(at.layers):
            planes[at.plane][layer, at.start : at.stop, list(at.heads)] = x[i].transpose(0, 1)

    deployment = Deployment.load(Settings(), kv)
    consumer = deployment.consumer(shard, scatter)
    try:
        consumer.fetch(locator, range(locator.num_tokens), time.monotonic() + FETCH_S)
        while not (events := consumer.poll()):
            time.sleep(0.01)
    finally:
        consumer.close()
        deployment.close()
    (event,) = events
    if isinstance(event, LoadFailed):
        raise event.error
    assert event.outcome.profile == "lossless"
    return planes


def put_into_store(model: Path, prompt: list[int], planes: Planes, folder: Path) -> int:
    """Store the whole pages that were fetched as an SGLang server of this model would; how many."""
    spec, kv = page_spec(served(model), torch.float32)
    count = planes["k"].shape[1] // PAGE
    lanes = {name: (x[:, : count * PAGE].unflatten(1, (count, PAGE)),) for name, x in planes.items()}
    pages = HostPages(kv, whole(kv), PAGE, 0, lanes)
    cache = cache_of(pages, spec, served(model), Settings.model_validate(settings(folder)), Exporter(False))
    try:
        keys = get_hash_str(prompt[: count * PAGE], None, PAGE)
        assert all(cache.keep(keys, range(count), None))
    finally:
        cache.store.close()
        cache.deployment.close()
    return count
