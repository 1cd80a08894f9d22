"""kvserve's metrics in SGLang's Prometheus endpoint: what a scheduler process registers is served by the HTTP server.

SGLang gathers the processes of a server through ``prometheus_client``'s multiprocess folder when it runs with
``--enable-metrics``. Without it nothing is exported; the counters of the deployment go on.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from kvserve_core.controller import Controller
from kvserve_core.latency import critical_bandwidth
from kvserve_core.metric_names import METRICS, Metric
from kvserve_core.policy import Decision, Outcome
from kvserve_core.pricing import Priced

OWN = (Metric("active", "gauge", "Requests and transfers that have not ended.", ("side",)),)
"""Beside the series that every engine has."""
log = logging.getLogger(__name__)


class Exporter:
    """The series of one process; does nothing when not ``enabled``."""

    def __init__(self, enabled: bool) -> None:
        self._series = _registered() if enabled else {}

    def count(self, name: str, value: float = 1, **labels: str) -> None:
        """Add to a counter."""
        if name in self._series:
            _labelled(self._series[name], labels).inc(value)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        if name in self._series:
            _labelled(self._series[name], labels).set(value)

    def observe(self, name: str, value: float) -> None:
        """Add to a histogram."""
        if name in self._series:
            self._series[name].observe(value)

    def transfer(self, outcome: Outcome, side: str) -> None:
        """A transfer ended. The prefill side counts bytes, so that a pair does not count them twice."""
        self.count("transfers", side=side, ok=str(outcome.ok).lower())
        if side == "producer":
            self.count("raw_bytes", outcome.raw_bytes)
            self.count("wire_bytes", outcome.wire_bytes)
            self.observe("encode_seconds", outcome.encode_s)
            if outcome.ok and outcome.wire_bytes:
                self.observe("compression_ratio", outcome.raw_bytes / outcome.wire_bytes)
        else:
            self.observe("transfer_seconds", outcome.transfer_s)
            self.observe("decode_seconds", outcome.decode_s)
            self.observe("load_seconds", outcome.total_s)

    def settled(self, controller: Controller, decision: Decision, outcome: Outcome) -> None:
        """A transfer over all ranks ended, and the controller has learned from it."""
        context = decision.context
        if context.slo_s is not None and context.model_s + outcome.encode_s + outcome.total_s > context.slo_s:
            self.count("slo_misses")
        self.set("goodput_bytes_per_second", controller.links.estimate(outcome.link), link=outcome.link)
        for priced in controller.feasible(context):
            if priced.profile.name == outcome.profile:
                self.set("break_even_bytes_per_second", _pays_below(priced, context.nbytes), profile=outcome.profile)


def _pays_below(priced: Priced, nbytes: int) -> float:
    """B* of a profile at what it costs now, for so many bytes; Theorem 6.1."""
    encode_s, decode_s, wire_bytes = priced.costs(nbytes)
    return critical_bandwidth(nbytes / wire_bytes, nbytes / max(encode_s + decode_s, 1e-9))


def _labelled(series: Any, labels: dict[str, str]) -> Any:
    return series.labels(**labels) if labels else series


@cache
def _registered() -> dict[str, Any]:
    """By name, once a process: a registry refuses a second series of a name."""
    try:
        import prometheus_client
    except ImportError:
        log.warning("prometheus_client is not installed: kvserve's metrics are not exported")
        return {}
    return {metric.name: _series(prometheus_client, metric) for metric in (*METRICS, *OWN)}


def _series(client: Any, metric: Metric) -> Any:
    if metric.kind == "counter":
        return client.Counter(metric.full_name, metric.help, metric.labels)
    if metric.kind == "gauge":
        return client.Gauge(metric.full_name, metric.help, metric.labels, multiprocess_mode="mostrecent")
    return client.Histogram(metric.full_name, metric.help, metric.labels, buckets=metric.buckets)
