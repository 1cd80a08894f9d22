"""What a worker does in a step, in the order the engine calls it. A half that fails is counted, the others go on."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank

from kvserve_core.deployment import Deployment
from kvserve_core.session import Consumer, Event, Producer
from kvserve_core.transport import Endpoint
from kvserve_vllm import compat
from kvserve_vllm.guard import isolated
from kvserve_vllm.metadata import Profile, RankInfo, StepMeta, WorkerReport
from kvserve_vllm.placement import Placement
from kvserve_vllm.prefix.keys import kv_scales
from kvserve_vllm.prefix.worker import PrefixWorker
from kvserve_vllm.self_test import check_layers
from kvserve_vllm.spec import ServedModel, layer_cache
from kvserve_vllm.stats import StatsBuffer
from kvserve_vllm.worker.loads import Ended, Loads
from kvserve_vllm.worker.offers import Offers

T = TypeVar("T")
IDLE_S = 0.004
"""How long a step in which nothing is computed may wait for a load to end: an engine that steps on and on takes the
interpreter from the threads that load, and they then take several times as long."""


class WorkerSide:
    """Sessions of one rank over its registered caches. store: the name of the store of prefixes, if any."""

    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, model: ServedModel, deployment: Deployment, store: str = ""
    ) -> None:
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._model, self._deployment, self._store = model, deployment, store
        self._role = vllm_config.kv_transfer_config
        self._shard = model.shard(get_tensor_model_parallel_rank(), get_pp_group().rank_in_group)
        self._producer: Producer | None = None
        self._consumer: Consumer | None = None
        self._info: RankInfo | None = None
        self._report = WorkerReport()
        self._idle = False
        self._ended: set[str] = set()
        self._let_go: set[str] = set()
        self.offers: Offers | None = None
        self.loads: Loads | None = None
        self.prefix: PrefixWorker | None = None
        self.stats = StatsBuffer(deployment.counters, first=self._shard == model.everyone()[0])

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Find out how the engine keeps KV, prove it, and open the sessions.

        Raises:
            UnsupportedSpecError: a layout that is not known, or not what it seemed.
        """
        placement, modules = self._placement(kv_caches)
        check_layers(placement, modules, self._kv_cache_config.num_blocks)
        device = next(iter(next(iter(placement.layers.values())).views.values())).device
        self._device = device
        endpoint, profiles = None, {}
        if self._role.is_kv_producer:
            endpoint, profiles = self._open_producer(placement, device)
        if self._role.is_kv_consumer:
            self._open_consumer(placement, device)
        if self._store:
            self.prefix = PrefixWorker(self._deployment, self._store, placement, self._model, self.stats)
            self.prefix.open(self._role, device, self._fence)
        peer = self._consumer.peer if self._consumer else None
        self._info = RankInfo(endpoint, profiles, peer, kv_scales(self._model.layers, modules))

    def _placement(self, kv_caches: Mapping[str, Any]) -> tuple[Placement, dict[str, Any]]:
        modules = self._vllm_config.compilation_config.static_forward_context
        caches = {}
        for stored in self._model.layers:
            if stored.name in kv_caches:
                cache = kv_caches[stored.name]
                on_cpu = not isinstance(cache, list | tuple) and cache.device.type == "cpu"
                isa = compat.cpu_isa(modules.get(stored.name)) if on_cpu else None
                caches[stored.layer] = layer_cache(stored, cache, self._model, self._kv_cache_config.num_blocks, isa)
        return Placement(self._model.kv, self._shard, caches), modules

    def _open_producer(self, placement: Placement, device: torch.device) -> tuple[Endpoint, dict[str, Profile]]:
        pipelines = self._deployment.pipelines(self._shard, device)
        self.offers = Offers(placement, self._fence)
        self._producer = self._deployment.producer(pipelines, self.offers.gather)
        self.offers.attach(self._producer)
        profiles = {name: Profile(tuple(p.chains), frozenset(p.used_artefacts)) for name, p in pipelines.items()}
        return Endpoint(self._deployment.transport().address, self._shard), profiles

    def _open_consumer(self, placement: Placement, device: torch.device) -> None:
        self.loads = Loads(placement, self._deployment.settings.deadline)
        self._consumer = self._deployment.consumer(
            self._shard, self.loads.scatter, device, everyone=self._model.everyone(), link=socket.gethostname()
        )
        self.loads.attach(self._consumer)

    def _fence(self) -> Event | None:
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    @property
    def info(self) -> RankInfo | None:
        """What the scheduler must know of this rank."""
        return self._info

    def before_batch(self, meta: StepMeta) -> None:
        """Before any block that a request lost can be overwritten."""
        if (offers := self.offers) is not None:
            self._isolated("handle_preemptions", lambda: offers.drop(meta.drop))
            self._isolated("handle_preemptions", lambda: offers.poll(self._report))
            for op in meta.open:
                self._isolated("handle_preemptions", partial(offers.open, op, self._report))
            self._isolated("handle_preemptions", lambda: offers.grow(meta.grow))
        if (prefix := self.prefix) is not None:
            self._isolated("handle_preemptions", lambda: prefix.before_batch(meta))

    def load(self, meta: StepMeta) -> None:
        """Start this step's loads."""
        self._idle = meta.idle
        self._computes(False)  # it waits for some of them
        if (loads := self.loads) is not None:
            self._isolated("start_load_kv", lambda: loads.cancel(meta.cancel))
            self._isolated("start_load_kv", lambda: loads.release(meta.release))
            self._isolated("start_load_kv", lambda: self.stats.loaded(loads.start(meta.load, self._report)))
        if (prefix := self.prefix) is not None:
            self._isolated("start_load_kv", lambda: prefix.load(meta, self._report))
        self._computes(not meta.idle)

    def _computes(self, busy: bool) -> None:
        """Decoding leaves room for a batch that runs beside it."""
        if self._consumer is not None:
            self._consumer.gate.busy = busy
        if self.prefix is not None:
            self.prefix.computes(busy)

    def after_forward(self, meta: StepMeta) -> None:
        """This step's tokens are computed (or queued on the GPU)."""
        if (offers := self.offers) is not None:
            self._isolated("wait_for_save", lambda: offers.advance(meta.ready))
        if (prefix := self.prefix) is not None:
            self._isolated("wait_for_save", lambda: prefix.after_forward(meta, self._report))

    def finished(self, req_ids: set[str]) -> tuple[set[str], Ended]:
        """Requests whose blocks the engine may have back, and loads that ended.

        A part that fails says nothing: what it holds stays with it until it can. Each is told once only, so what the
        others said must get through.
        """
        sent: set[str] = set()
        ended = Ended()
        if (offers := self.offers) is not None:
            self._isolated("get_finished", lambda: offers.poll(self._report))
            sent = self._said(lambda: offers.finished(req_ids), sent)
        if (loads := self.loads) is not None:
            if self._idle:
                self._isolated("get_finished", lambda: loads.rest(IDLE_S))
            self._isolated("get_finished", lambda: self.stats.loaded(loads.poll(self._report)))
            ended = self._said(loads.ended.take, ended)
        if (prefix := self.prefix) is not None:
            if self._idle:
                self._isolated("get_finished", lambda: prefix.rest(IDLE_S))
            self._isolated("get_finished", lambda: prefix.poll(self._report))
            sent = self._given_back(prefix, req_ids, sent)
            self._isolated("get_finished", lambda: ended.join(prefix.ended()))
        self._isolated("get_finished", self._count_held)
        return sent, ended

    def _given_back(self, prefix: PrefixWorker, req_ids: set[str], sent: set[str]) -> set[str]:
        """While the store half cannot say which blocks it still reads, none are given back; then all of them."""
        self._ended |= req_ids
        self._let_go |= sent
        given = self._said(lambda: prefix.finished(self._ended, self._let_go, self.offers), None)
        if given is None:
            return set()
        self._ended, self._let_go = set(), set()
        return given

    def _count_held(self) -> None:
        self.stats.held(self._producer.budget.held_bytes if self._producer is not None else 0)

    def _said(self, part: Callable[[], T], default: T) -> T:
        return isolated(self.stats, "get_finished", part, default)

    def _isolated(self, hook: str, part: Callable[[], None]) -> None:
        isolated(self.stats, hook, part, None)

    def report(self) -> WorkerReport | None:
        """What the scheduler side learns from; None when nothing happened."""
        if self._report.empty:
            return None
        report, self._report = self._report, WorkerReport()
        return report

    def close(self) -> None:
        """Stop threads, close sockets."""
        if self.prefix is not None:
            self.prefix.close()
        for session in (self._producer, self._consumer):
            if session is not None:
                session.close()
        self._producer = self._consumer = None
        self._deployment.close()
