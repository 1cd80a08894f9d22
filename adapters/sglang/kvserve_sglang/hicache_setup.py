"""From SGLang's host pool and its storage config to a :class:`~kvserve_sglang.hicache_cache.PageCache`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvserve_core.deployment import CPU, Deployment
from kvserve_core.errors import ConfigError, UnsupportedSpecError
from kvserve_core.library import Profile
from kvserve_core.model import model_id
from kvserve_core.pipeline import Pipeline
from kvserve_core.prefix import check_storable, namespace
from kvserve_core.profile import PipelineSpec
from kvserve_core.settings import Settings, load_settings
from kvserve_core.spec import KVSpec, Shard
from kvserve_sglang.hicache_cache import PageCache
from kvserve_sglang.hicache_pages import HostPages, host_pages
from kvserve_sglang.hicache_quality import Held
from kvserve_sglang.hicache_store import PageStore
from kvserve_sglang.metrics import Exporter
from kvserve_sglang.setup import TransferDeployment, check_policy, folder
from kvserve_sglang.spec import model_spec

SMALLEST_PAGE, LARGEST_PAGE = 16, 65536
"""Tokens of a page: what a pipeline's grid can be."""
DEFAULT_STORE = "file"


@dataclass(frozen=True)
class Served:
    """What the server says of itself. cache_dtype: as its option names it, with the file of scales if it has one."""

    config: Mapping[str, Any]
    model: str
    cache_dtype: str
    metrics: bool = False

    @classmethod
    def now(cls) -> Served:
        """Of the server in this process."""
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.runtime_context import get_server_args

        args = get_server_args()
        model = ModelConfig.from_server_args(args)
        dtype = f"{args.kv_cache_dtype} {getattr(args, 'quantization_param_path', None) or ''}".strip()
        identity = model_id(folder(model.model_path))
        return cls(model.hf_text_config.to_dict(), identity, dtype, bool(args.enable_metrics))


class PageDeployment(TransferDeployment):
    """A model's deployment whose pipelines have a grid of one page: every page is encoded on its own."""

    def __init__(self, model: Deployment, kv: KVSpec, page_size: int) -> None:
        super().__init__(model, kv)
        self._page_size = page_size

    def pipeline(self, profile: Profile, shard: Shard, device: torch.device) -> Pipeline:
        """On a grid of one page; raises as the one it extends."""
        paged = page_pipeline(profile.pipeline, self._page_size)
        return super().pipeline(profile.model_copy(update={"pipeline": paged}), shard, device)


def page_pipeline(spec: PipelineSpec, page_size: int) -> PipelineSpec:
    """The same stages on a grid of one page.

    Raises:
        UnsupportedSpecError: it keeps the newest tokens of a request raw, and a stored page knows no request.
    """
    if spec.recent_tokens:
        raise UnsupportedSpecError(
            f"the profile keeps the newest tokens of a request raw ('recent_tokens' = {spec.recent_tokens}), and a"
            " stored page knows no request; use a profile with 'recent_tokens' = 0",
            "recent_tokens",
        )
    return spec.model_copy(update={"segment_tokens": page_size})


def check_config(storage_config: Any) -> Mapping[str, Any]:
    """The table of ``--hicache-storage-backend-extra-config``.

    Raises:
        ConfigError, UnsupportedSpecError: it lacks ``interface_v1``, or the topology is not carried.
    """
    extra: Mapping[str, Any] = storage_config.extra_config or {}
    if not extra.get("interface_v1"):
        raise ConfigError("set 'interface_v1' to 1 in --hicache-storage-backend-extra-config", "interface_v1")
    if storage_config.attn_cp_size > 1 or getattr(storage_config, "dcp_size", 1) > 1:
        raise UnsupportedSpecError("kvserve's HiCache storage does not carry context parallelism; serve without it")
    return extra


def check_page(page_size: int) -> None:
    """Raise UnsupportedSpecError for pages that a pipeline cannot encode on their own."""
    if not SMALLEST_PAGE <= page_size <= LARGEST_PAGE:
        raise UnsupportedSpecError(
            f"a page of {page_size} tokens is one object in the store; set --page-size to {SMALLEST_PAGE} or more, best"
            " 64 or more"
        )


def page_spec(served: Served, dtype: torch.dtype) -> tuple[KVSpec, KVSpec]:
    """The model's cache, and the same as pages hold it: without windows, as a page may continue any prefix.

    Raises:
        UnsupportedSpecError: a cache that pages do not hold.
    """
    model = model_spec(served.config, dtype, served.model, None)
    check_storable(model)
    return model, KVSpec(model.model_id, tuple(replace(group, window=None) for group in model.groups))


def shard_of(pool: Any, storage_config: Any) -> Shard:
    """This rank's part. Ranks of MLA hold the same pages, which the first one writes."""
    layers = tuple(range(pool.start_layer, pool.start_layer + pool.layer_num))
    if storage_config.is_mla_model:
        return Shard(layers)
    return Shard(layers, storage_config.tp_rank, storage_config.tp_size)


def open_cache(pool: Any, storage_config: Any, served: Served, settings: Settings | None = None) -> PageCache:
    """Everything of one rank.

    Raises:
        KVServeError: this model, pool or configuration cannot be served; the message says what to do.
    """
    extra = check_config(storage_config)
    check_page(pool.page_size)
    settings = settings or load_settings(extra.get("kvserve")).settings
    dtype = torch.uint8 if pool.dtype.itemsize == 1 else pool.dtype
    model, kv = page_spec(served, dtype)
    pages = host_pages(pool, kv, shard_of(pool, storage_config))
    metrics = Exporter(served.metrics or storage_config.enable_storage_metrics)
    cache = cache_of(pages, model, served, settings, metrics, str(extra.get("prefix_store", DEFAULT_STORE)))
    return replace(cache, alone=storage_config.tp_size * storage_config.pp_size == 1)


def cache_of(
    pages: HostPages, model: KVSpec, served: Served, settings: Settings, metrics: Exporter, store: str = DEFAULT_STORE
) -> PageCache:
    """The cache over pages of any origin.

    Raises:
        ConfigError: the settings, their library or their store are wrong.
    """
    deployment = PageDeployment(Deployment.load(settings, model), pages.kv, pages.page_size)
    check_policy(deployment)
    metrics.set("library_loaded", float(deployment.library is not None))
    pipelines = deployment.pipelines(pages.shard, CPU)
    acceptable = deployment.acceptable(pipelines, None)
    kept = PageStore(deployment, pages, pipelines, store)
    return PageCache(deployment, kept, space_of(pages, served), acceptable, metrics, Held())


def space_of(pages: HostPages, served: Served) -> str:
    """What the names of all pages start from: model, rank, page size; and what gives bytes their meaning."""
    opaque = any(not plane.dtype.is_float for group in pages.kv.groups for plane in group.planes)
    return namespace(pages.kv, pages.shard, page=pages.page_size, dtype=served.cache_dtype if opaque else None)
