"""The class that vLLM loads, as ``kv_connector`` ``KVServeConnector`` of module ``kvserve_vllm.connector``.

It hands each call to the side it is for. Exceptions never leave a hook once the engine runs: they are logged, and the
request is served without its transfer. At start-up they do: a wrong setting or an unknown cache layout is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)

from kvserve_core.deployment import Deployment
from kvserve_core.errors import ConfigError
from kvserve_core.settings import load_settings
from kvserve_vllm import compat
from kvserve_vllm.guard import guarded
from kvserve_vllm.metadata import RankInfo, StepMeta, WorkerReport
from kvserve_vllm.options import split_options
from kvserve_vllm.prefix.keys import check_prefixes, check_windows
from kvserve_vllm.scheduler.side import SchedulerSide
from kvserve_vllm.spec import served_model
from kvserve_vllm.stats import KVServeMetrics, KVServeStats
from kvserve_vllm.worker.loads import Ended
from kvserve_vllm.worker.side import WorkerSide

log = logging.getLogger(__name__)
T = TypeVar("T")


class KVServeConnector(KVConnectorBase_V1, SupportsHMA):
    """Compressed KV over any transport, decided per request."""

    _cache_hit_source = compat.HIT_SOURCE

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        options, extra = split_options(transfer.kv_connector_extra_config)
        model = served_model(vllm_config, kv_cache_config)
        if options.prefix_store:
            check_prefixes(model, vllm_config.cache_config)
        loaded = load_settings(extra)
        deployment = Deployment.load(loaded.settings, model.kv)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._invalid: set[int] = set()
        self._several_pools = len(kv_cache_config.kv_cache_groups) > 1
        if transfer.is_kv_consumer:
            check_windows(model)
            if self._several_pools:
                compat.check_groups()
        windows = any(group.window is not None for group in model.kv.groups)
        self._by_request = self._several_pools or (windows and compat.TransferResults is not None)
        if role == KVConnectorRole.SCHEDULER:
            _say(transfer, model.kv.fingerprint, loaded.unknown_env)
            wait = options.sync_load and not self._by_request
            sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
            self._scheduler = SchedulerSide(transfer, sizes, model, deployment, wait, options.prefix_store)
        else:
            self._worker = WorkerSide(vllm_config, kv_cache_config, model, deployment, options.prefix_store)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Heads of a block side by side, where the engine has a choice."""
        model = vllm_config.model_config
        if model is None:
            return None
        return compat.layout_preference(vllm_config.device_config.device_type, bool(model.use_mla))

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Start-up: the caches are allocated."""
        self._side(self._worker).register(kv_caches)

    def get_handshake_metadata(self) -> RankInfo | None:
        """What the scheduler side must know of this rank."""
        return self._side(self._worker).info

    @guarded(lambda: None)
    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Before lost blocks can be overwritten."""
        self._side(self._worker).before_batch(kv_connector_metadata)

    @guarded(lambda: None)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start loads; those this step needs have ended on return."""
        del forward_context, kwargs
        self._side(self._worker).load(self._meta())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are not per layer: CUDA graphs skip this hook."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Caches are read block-wise after the forward pass: CUDA graphs skip this hook."""

    @guarded(lambda: None)
    def wait_for_save(self) -> None:
        """The forward pass of this step is queued: its tokens become final."""
        self._side(self._worker).after_forward(self._meta())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """``(sent, received)``; what failed is in :meth:`get_block_ids_with_load_errors`."""
        sent, ended = self._ended(finished_req_ids)
        self._invalid |= ended.blocks
        return sent or None, ended.done or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """The same with failures by request (0.31 and newer)."""
        sent, ended = self._ended(finished_req_ids)
        failed: set[str] = set()
        if self._by_request:  # what a window held before its request's last tokens is gone: nothing can be kept
            failed = ended.failed
        else:
            self._invalid |= ended.blocks
        return compat.TransferResults(finished_sending=sent, finished_recving=ended.done, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of loads that ended without all their tokens."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    @guarded(lambda: (set(), Ended()), "get_finished")
    def _ended(self, finished_req_ids: set[str]) -> tuple[set[str], Ended]:
        return self._side(self._worker).finished(finished_req_ids)

    @guarded(lambda: None)
    def get_kv_connector_stats(self) -> KVServeStats | None:
        """Samples since the last step."""
        return (self._scheduler or self._side(self._worker)).stats.take()

    @guarded(lambda: None)
    def build_connector_worker_meta(self) -> WorkerReport | None:
        """What the scheduler side learns from."""
        return self._side(self._worker).report()

    @guarded(lambda: None)
    def shutdown(self) -> None:
        """Stop threads, close sockets."""
        (self._scheduler or self._side(self._worker)).close()

    # Scheduler side

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """All ranks are up.

        Raises:
            ConfigError: MultiConnector hands on what its first connector said of the ranks, and that is not this one.
        """
        foreign = next((type(said).__name__ for said in metadata.values() if not isinstance(said, RankInfo)), None)
        if foreign is not None:
            raise ConfigError(
                f"the ranks are described by a {foreign} of another connector; list KVServeConnector first",
                "kv_connector_extra_config.connectors",
            )
        self._side(self._scheduler).meet(metadata)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """The engine's blocks and what is cached of them."""
        self._side(self._scheduler).bind(gpu_block_pool)

    @guarded(lambda: None)
    def on_new_request(self, request: Any) -> None:
        """A request arrived."""
        self._side(self._scheduler).arrived(request)

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond the computed ones, and whether between steps."""
        return self._side(self._scheduler).matched(request, num_computed_tokens)

    @guarded(lambda: None)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The engine counts on ``num_external_tokens`` from us."""
        self._side(self._scheduler).allocated(request, blocks, num_external_tokens)

    @guarded(StepMeta)
    def build_connector_meta(self, scheduler_output: Any) -> StepMeta:
        """The workers' orders for this step."""
        return self._side(self._scheduler).plan(scheduler_output)

    @guarded(lambda: None)
    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers saw in the last step."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._side(self._scheduler).learn(report)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """With one cache group."""
        return self.request_finished_all_groups(request, (block_ids,))

    @guarded(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """``(keep its blocks, kv_transfer_params of the answer)``."""
        del block_ids
        return self._side(self._scheduler).finished(request)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """A transfer is of the request's own blocks: every group is restored."""
        del request
        groups = self._kv_cache_config.kv_cache_groups
        return getattr(self._kv_cache_config, "transfer_group_ids", tuple(range(len(groups))))

    # Metrics

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVServeStats:
        """Samples that crossed a process."""
        return KVServeStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVServeMetrics:
        """For vLLM's own ``/metrics``."""
        return KVServeMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _hook_failed(self, hook: str) -> None:
        """Count a hook that failed; the metric is this connector's own."""
        side = self._scheduler or self._worker
        if side is not None:
            side.stats.hook_failed(hook)

    def _meta(self) -> StepMeta:
        meta = self._get_connector_metadata()
        return meta if isinstance(meta, StepMeta) else StepMeta()

    def _side(self, side: T | None) -> T:
        if side is None:
            raise RuntimeError(f"this hook is not for the connector's {self.role.name.lower()} role")
        return side


def _say(transfer: Any, fingerprint: str, unknown_env: Iterable[str]) -> None:
    for name in unknown_env:
        log.warning("the variable %r names no setting of kvserve and is ignored", name)
    if problem := compat.unsupported():
        log.warning("%s", problem)
    if transfer.is_kv_consumer and transfer.kv_load_failure_policy == "fail":
        log.warning(
            "a request whose KV cannot be loaded will fail ('kv_load_failure_policy' is 'fail'); set it to 'recompute'"
            " in --kv-transfer-config to have such requests computed here"
        )
    log.info("kvserve serves model %s as %s", fingerprint[:12], transfer.kv_role)
