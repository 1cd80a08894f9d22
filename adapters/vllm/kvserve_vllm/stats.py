"""Metrics on vLLM's own ``/metrics`` and in its log: one table of names for every engine (``metric_names``).

Samples are lists ``[labels, value]`` by metric, plain enough for JSON: workers send them to the front end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvserve_core.metric_names import BY_NAME, METRICS, Metric
from kvserve_core.metrics import Counters
from kvserve_core.policy import Outcome

Sample = list[Any]
"""``[[label values...], number]``."""


@dataclass
class KVServeStats(KVConnectorStats):
    """``data``: samples by metric. Counters add up, gauges keep the last, histograms keep all."""

    def __post_init__(self) -> None:
        if self.data is None:
            self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def add(self, name: str, value: float, *labels: str) -> None:
        """One sample of a metric of the table."""
        samples: list[Sample] = self.data.setdefault(name, [])
        metric = BY_NAME[name]
        found = next((s for s in samples if s[0] == list(labels)), None)
        if found is None or metric.kind == "histogram":
            samples.append([list(labels), value])
        else:
            found[1] = value if metric.kind == "gauge" else found[1] + value

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """This interval's or rank's samples and another's."""
        for name, samples in other.data.items():
            for labels, value in samples:
                self.add(name, value, *labels)
        return self

    def reduce(self) -> dict[str, int | float]:
        """What one log line says."""
        total = {name: sum(s[1] for s in self.data.get(name, ())) for name in BY_NAME}
        said: dict[str, int | float] = {
            "transfers": total["transfers"],
            "raw MB": round(total["raw_bytes"] / 1e6, 3),
            "wire MB": round(total["wire_bytes"] / 1e6, 3),
            "ratio": round(total["raw_bytes"] / total["wire_bytes"], 2) if total["wire_bytes"] else 0.0,
            "fallbacks": total["fallbacks"],
        }
        return said

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not self.data


class StatsBuffer:
    """Samples of one connector instance since they were last taken.

    first: whether this is the first rank. Every rank counts its bytes; a load as such is one load, whatever the ranks.
    """

    def __init__(self, counters: Counters, first: bool = True) -> None:
        self._counters, self._seen, self._first = counters, counters.snapshot(), first
        self._stats = KVServeStats(data={})
        self._held_bytes: int | None = None

    def add(self, name: str, value: float, *labels: str) -> None:
        """One sample."""
        self._stats.add(name, value, *labels)

    def hook_failed(self, hook: str) -> None:
        """A hook of the engine, or a part of it, failed."""
        self.add("hook_failures", 1, hook)

    def transferred(self, outcome: Outcome, side: str) -> None:
        """A transfer that ended, as one side saw it."""
        if self._first:
            self.add("transfers", 1, side, "true" if outcome.ok else "false")
        if not outcome.ok:
            return
        self.add("raw_bytes", outcome.raw_bytes)
        self.add("wire_bytes", outcome.wire_bytes)
        if outcome.wire_bytes:
            self.add("compression_ratio", outcome.raw_bytes / outcome.wire_bytes)
        self.add("transfer_seconds", outcome.transfer_s)
        self.add("decode_seconds", outcome.decode_s)

    def loaded(self, ended: Iterable[tuple[Any, Outcome]]) -> None:
        """Loads that ended on this rank."""
        for load, outcome in ended:
            self.transferred(outcome, "consumer")
            if outcome.ok and self._first:
                self.add("load_seconds", outcome.total_s)
                self.add("external_tokens", load.stop - load.start)

    def held(self, nbytes: int) -> None:
        """Host bytes held for consumers, in every step: told when they change, and the first time in any case."""
        if nbytes != self._held_bytes:
            self._held_bytes = nbytes
            self.add("published_bytes", nbytes)

    def take(self) -> KVServeStats | None:
        """Everything since the last call, None when nothing happened."""
        now = self._counters.snapshot()
        for rung in ("codec", "raw", "recompute"):
            if more := now.get(f"fallback_{rung}", 0) - self._seen.get(f"fallback_{rung}", 0):
                self.add("fallbacks", more, rung)
        self._seen = now
        if self._stats.is_empty():
            return None
        taken, self._stats = self._stats, KVServeStats(data={})
        return taken


class KVServeMetrics(KVConnectorPromMetrics):
    """The table as Prometheus metrics, with vLLM's own labels in front."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._series = {metric.name: self._make(metric) for metric in METRICS}

    def _make(self, metric: Metric) -> Any:
        kinds = {"counter": self._counter_cls, "gauge": self._gauge_cls, "histogram": self._histogram_cls}
        more = {"buckets": metric.buckets} if metric.buckets else {}
        return kinds[metric.kind](
            name=metric.full_name,
            documentation=metric.help,
            labelnames=[*self._labelnames, *metric.labels],
            **more,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an interval's samples."""
        engine = self.per_engine_labelvalues[engine_idx]
        for name, samples in transfer_stats_data.items():
            for labels, value in samples:
                series = self._series[name].labels(*engine, *labels)
                match BY_NAME[name].kind:
                    case "counter":
                        series.inc(value)
                    case "gauge":
                        series.set(value)
                    case "histogram":
                        series.observe(value)
