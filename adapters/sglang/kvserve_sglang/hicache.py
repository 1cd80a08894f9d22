"""HiCache's storage tier, compressed: ``--hicache-storage-backend dynamic`` names this class; see docs/sglang.md."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import sglang.version
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig, HiCacheStorageExtraInfo, PoolName

from kvserve_core.errors import UnsupportedSpecError
from kvserve_sglang.hicache_cache import PageCache, Prefix
from kvserve_sglang.hicache_check import check_round_trip
from kvserve_sglang.hicache_setup import Served, check_config, open_cache
from kvserve_sglang.versions import check_version

Result = TypeVar("Result")
log = logging.getLogger(__name__)


class KVServeHiCacheStorage(HiCacheStorage):
    """One per rank. SGLang calls it on its prefetch and backup threads; no exception goes back to them.

    ``--hicache-storage-backend-extra-config`` takes, beside SGLang's own keys, ``prefix_store`` (a transport that
    keeps, default ``file``) and ``kvserve`` (settings, which win over the file that ``KVSERVE_CONFIG`` names).

    Raises:
        KVServeError: this release, topology or configuration is not served. SGLang then does not start.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        check_version(sglang.version.__version__)
        check_config(storage_config)
        self._config = storage_config
        self._cache: PageCache | None = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """SGLang's pages: open the store and try it.

        Raises:
            KVServeError: the pool is not known, or a page does not come back as it was.
        """
        super().register_mem_pool_host(mem_pool_host)
        self.close()  # of a pool that was registered before
        self._cache = cache = open_cache(mem_pool_host, self._config, Served.now())
        try:
            check_round_trip(mem_pool_host, cache.store)
        except BaseException:
            self.close()
            raise
        log.info(
            "kvserve keeps pages of %s in %s, by profiles %s",
            cache.deployment.kv.model_id,
            cache.store.store.address,
            ", ".join(sorted(cache.acceptable)),
        )

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: PoolName) -> None:
        """Further pools of a model.

        Raises:
            UnsupportedSpecError: what is in them is not stored, so a restored prefix would lack it.
        """
        if host_pool_name != PoolName.KV:
            raise UnsupportedSpecError(
                f"kvserve's HiCache storage does not carry the pool {str(host_pool_name)!r} of this model; serve"
                " without a storage backend, or with another one"
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many of the first pages are stored so that :meth:`batch_get_v1`, told as much, may load them."""
        return self._guarded("batch_exists", 0, lambda cache: cache.leading(keys, _prefix(extra_info)))

    def exists(self, key: str) -> bool:
        """Whether a page is stored exactly: a lossy one needs its prefix."""
        return self.batch_exists([key]) == 1

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Restore pages into the host pool; which of them came."""
        nothing = [False] * len(keys)
        return self._guarded(
            "batch_get_v1",
            nothing,
            lambda cache: cache.load(keys, self._pages(keys, host_indices), _prefix(extra_info)),
        )

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages; which of them are there now."""
        nothing = [False] * len(keys)
        return self._guarded(
            "batch_set_v1",
            nothing,
            lambda cache: cache.keep(keys, self._pages(keys, host_indices), _prefix(extra_info)),
        )

    def _pages(self, keys: list[str], host_indices: torch.Tensor) -> list[int]:
        """SGLang names the slot of every token; a page's are in one row."""
        size = self.mem_pool_host.page_size
        return [int(slot) // size for slot in host_indices[: len(keys) * size : size].tolist()]

    def _guarded(self, hook: str, otherwise: Result, work: Callable[[PageCache], Result]) -> Result:
        cache = self._cache
        if cache is None:
            return otherwise
        try:
            return work(cache)
        except Exception:  # a store that fails costs a computation, never the server
            log.exception("%s failed, its pages are computed", hook)
            cache.exporter.count("hook_failures", hook=hook)
            return otherwise

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> NoReturn:
        """Of the older interface, which SGLang does not use with ``interface_v1``."""
        raise NotImplementedError("kvserve's HiCache storage speaks interface_v1 only")

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> NoReturn:
        """Of the older interface."""
        self.get("")

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> NoReturn:
        """Of the older interface."""
        self.get(key)

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> NoReturn:
        """Of the older interface."""
        self.get("")

    def clear(self) -> None:
        """A store may serve other engines too, so its owner empties it."""
        log.warning("kvserve does not empty its store on SGLang's request; remove the store's objects yourself")

    def close(self) -> None:
        """End the sessions and the store's threads."""
        if self._cache is not None:
            self._cache.store.close()
            self._cache.deployment.close()
            self._cache = None


def _prefix(extra_info: HiCacheStorageExtraInfo | None) -> Prefix:
    return extra_info.prefix_keys if extra_info is not None else None
