"""Host pools of the real SGLang over device pools on the CPU, and its storage backend on top of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["HICACHE_ON_CPU"] = "1"

import hicache_on_cpu
import torch
from inprocess import MHA, MLA, mha_pool, mla_pool
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, HiCacheStorageExtraInfo
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _build_mha_mla_host_pool
from sglang.srt.mem_cache.utils import get_hash_str
from sglang.test.test_utils import published_topology

from kvserve_sglang import hicache
from kvserve_sglang.hicache_setup import Served

PAGE = 16
LAYOUTS = ("layer_first", "page_first", "page_first_direct")
SERVED = {"mha": Served(MHA, "tiny", "auto"), "mla": Served(MLA, "tiny", "auto")}
hicache_on_cpu.install()


def host_pool(kind: str, layout: str, dtype: torch.dtype = torch.bfloat16, ranks: int = 1, page: int = PAGE) -> Any:
    """A host pool of 1088 tokens."""
    with published_topology():
        device = (mha_pool if kind == "mha" else mla_pool)(page, ranks, dtype)
        return _build_mha_mla_host_pool(
            pool=device,
            host_to_device_ratio=1.01,
            page_size=page,
            layout=layout,
            allocator_type="default",
            pool_label="kv",
        )


def storage_config(kind: str, folder: Path, rank: int = 0, ranks: int = 1, **settings: Any) -> HiCacheStorageConfig:
    """What SGLang's controller would say; settings: kvserve's."""
    policy = {"name": "static", "configuration": {"profile": "lossless"}}
    given = {"transport": {"file": {"path": str(folder)}}, "policy": policy, **settings}
    extra = {"interface_v1": 1, "kvserve": given}
    return HiCacheStorageConfig(rank, ranks, 0, 1, 0, 1, kind == "mla", False, False, "tiny", extra_config=extra)


@contextmanager
def storage(kind: str, pool: Any, config: HiCacheStorageConfig) -> Iterator[hicache.KVServeHiCacheStorage]:
    """A rank's backend with its pool registered; only what the server would say of itself is given."""
    made = hicache.KVServeHiCacheStorage(config, {})
    before, hicache.Served.now = hicache.Served.now, classmethod(lambda cls: SERVED[kind])
    try:
        made.register_mem_pool_host(pool)
        yield made
    finally:
        hicache.Served.now = before
        made.close()


def fill(pool: Any, pages: list[int], seed: int = 1) -> list[torch.Tensor]:
    """Different values in each page; what SGLang reads there."""
    written = []
    for i, page in enumerate(pages):
        seeded = torch.Generator().manual_seed(100 * seed + i)
        like = pool.get_data_page(page * PAGE)
        values = torch.randn(like.shape, generator=seeded)
        pool.set_from_flat_data_page(page * PAGE, cast(values, like))
        written.append(pool.get_data_page(page * PAGE).clone())
    return written


def cast(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Values as a page holds them; bytes where the page holds bytes."""
    return values.to(like.dtype) if like.dtype.is_floating_point else (values * 10 + 128).to(torch.uint8)


def keys_of(count: int, first: int = 0) -> list[str]:
    """SGLang's hashes of the pages of a prompt that counts up from ``first``."""
    return list(get_hash_str(list(range(first, first + count * PAGE)), None, PAGE))


def slots(pages: list[int]) -> torch.Tensor:
    """Host slots of all tokens of pages."""
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def info(*prefix: str) -> HiCacheStorageExtraInfo:
    """What comes before a call's pages."""
    return HiCacheStorageExtraInfo(prefix_keys=list(prefix))
