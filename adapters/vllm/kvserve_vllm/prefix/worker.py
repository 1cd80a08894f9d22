"""The store half of a rank: a session that writes cells, one that reads them, as far as its role goes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from kvserve_core.deployment import Deployment
from kvserve_core.session import Consumer, Producer
from kvserve_core.spec import Shard
from kvserve_core.transport import Endpoint
from kvserve_vllm.guard import isolated
from kvserve_vllm.held import Fence
from kvserve_vllm.metadata import StepMeta, WorkerReport
from kvserve_vllm.placement import Placement
from kvserve_vllm.prefix.loader import PrefixLoader
from kvserve_vllm.prefix.scheduler import link_name
from kvserve_vllm.prefix.writer import PrefixWriter
from kvserve_vllm.spec import ServedModel
from kvserve_vllm.stats import StatsBuffer
from kvserve_vllm.worker.loads import Ended
from kvserve_vllm.worker.offers import Offers

log = logging.getLogger(__name__)
CLOSE_S = 5.0
"""How long a shutdown waits for what a store is about."""


class PrefixWorker:
    """In the order the engine calls it: before the batch, loads, after the forward pass, what ended."""

    def __init__(
        self,
        deployment: Deployment,
        store: str,
        placement: Placement,
        model: ServedModel,
        stats: StatsBuffer,
    ) -> None:
        self._deployment, self._name, self._placement, self._model = deployment, store, placement, model
        self._shard: Shard = placement.shard
        self._rank = model.everyone().index(self._shard)
        self._stats = stats
        self._producer: Producer | None = None
        self._consumer: Consumer | None = None
        self.writer: PrefixWriter | None = None
        self.loader: PrefixLoader | None = None

    def open(self, role: Any, device: torch.device, fence: Fence) -> None:
        """Open the sessions.

        Raises:
            ConfigError: the store's configuration is wrong.
        """
        address = self._deployment.store(self._name).address
        if role.is_kv_producer:
            self.writer = PrefixWriter(self._placement, self._rank, fence)
            pipelines = self._deployment.pipelines(self._shard, device, store=True)
            self._producer = self._deployment.producer(pipelines, self.writer.gather, self._name)
            self.writer.attach(self._producer)
        if role.is_kv_consumer:
            endpoint = Endpoint(address, self._shard)
            self.loader = PrefixLoader(self._placement, endpoint, self._rank, self._deployment.settings.deadline)
            self._consumer = self._deployment.consumer(
                self._shard,
                self.loader.scatter,
                device,
                everyone=self._model.everyone(),
                link=link_name(self._name),
            )
            self.loader.attach(self._consumer)

    def before_batch(self, meta: StepMeta) -> None:
        """Before any block that a request lost can be overwritten."""
        if self.writer is not None:
            self.writer.drop(meta.prefix_drop)

    def load(self, meta: StepMeta, report: WorkerReport) -> None:
        """Start this step's loads."""
        if (loader := self.loader) is not None:
            self._isolated("start_load_kv", lambda: loader.cancel(meta.prefix_cancel))
            self._isolated("start_load_kv", lambda: self._stats.loaded(loader.start(meta.prefix_load, report)))

    def computes(self, busy: bool) -> None:
        """Whether a batch runs now, beside which decoding leaves room."""
        if self._consumer is not None:
            self._consumer.gate.busy = busy

    def after_forward(self, meta: StepMeta, report: WorkerReport) -> None:
        """This step's tokens are computed (or queued on the GPU)."""
        if self.writer is not None:
            self.writer.store(meta.prefix_store, report)

    def rest(self, seconds: float) -> None:
        """In a step in which nothing is computed: see :meth:`PrefixLoader.rest`."""
        if self.loader is not None:
            self.loader.rest(seconds)

    def poll(self, report: WorkerReport) -> None:
        """What the sessions have to tell."""
        if (writer := self.writer) is not None:
            self._isolated("get_finished", lambda: writer.poll(report))
        if (loader := self.loader) is not None:
            self._isolated("get_finished", lambda: self._stats.loaded(loader.poll(report)))

    def _isolated(self, hook: str, part: Callable[[], None]) -> None:
        isolated(self._stats, hook, part, None)

    def finished(self, req_ids: set[str], sent: set[str], offers: Offers | None) -> set[str]:
        """Requests whose blocks the engine may have back; see :meth:`PrefixWriter.finished`."""
        if self.writer is None:
            return sent
        return self.writer.finished(req_ids, sent, lambda req_id: offers is not None and offers.holds(req_id))

    def ended(self) -> Ended:
        """Loads that ended since the last step."""
        return Ended() if self.loader is None else self.loader.ended.take()

    def close(self) -> None:
        """Stop threads; within ``CLOSE_S`` those that a store keeps hanging are left behind."""
        until_s = time.monotonic() + CLOSE_S
        closing = threading.Thread(target=self._close_consumer, name="kvserve-close", daemon=True)
        closing.start()
        if self._producer is not None:
            self._producer.close(CLOSE_S)
        closing.join(max(0.0, until_s - time.monotonic()))
        if closing.is_alive():
            log.warning("the store %r did not let go of a load within %g s", self._name, CLOSE_S)
        self._producer = self._consumer = None

    def _close_consumer(self) -> None:
        if (consumer := self._consumer) is not None:
            consumer.close()
