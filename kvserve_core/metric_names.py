"""The metrics that engine adapters export: one table, so that dashboards serve every engine. Imports no exporter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PREFIX = "kvserve:"
"""As in ``vllm:``; where an exporter refuses the colon, an underscore takes its place."""


@dataclass(frozen=True)
class Metric:
    """One exported series. Histograms count seconds or ratios in ``buckets``."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        """With its prefix; counters get ``_total`` from the exporter."""
        return PREFIX + self.name


SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
RATIOS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0)

METRICS: tuple[Metric, ...] = (
    Metric("raw_bytes", "counter", "Original bytes of the KV cache that was moved."),
    Metric("wire_bytes", "counter", "Bytes on the wire for them: frames with all metadata."),
    Metric("transfers", "counter", "Transfers that ended, by side and whether they came through.", ("side", "ok")),
    Metric("decisions", "counter", "Profiles chosen, with the one-word reason.", ("profile", "reason")),
    Metric("fallbacks", "counter", "Steps down: profile, codec (not decodable there), raw, recompute.", ("rung",)),
    Metric("hook_failures", "counter", "Engine hooks that failed; the engine went on without them.", ("hook",)),
    Metric("slo_misses", "counter", "Requests whose transfer ended after their deadline."),
    Metric("lossy_cache_tokens", "counter", "Prompt tokens served from lossy entries of the engine's prefix cache."),
    Metric("external_tokens", "counter", "Prompt tokens whose cache was loaded instead of computed."),
    Metric("compression_ratio", "histogram", "Original bytes over wire bytes of a transfer.", (), RATIOS),
    Metric("encode_seconds", "histogram", "Encode time of a transfer.", (), SECONDS),
    Metric("transfer_seconds", "histogram", "Time on the link of a transfer.", (), SECONDS),
    Metric("decode_seconds", "histogram", "Decode time of a transfer.", (), SECONDS),
    Metric("load_seconds", "histogram", "From the fetch to decoded KV.", (), SECONDS),
    Metric("goodput_bytes_per_second", "gauge", "Estimated goodput of a link.", ("link",)),
    Metric("break_even_bytes_per_second", "gauge", "B*: below this bandwidth the profile pays.", ("profile",)),
    Metric("published_bytes", "gauge", "Host bytes held for consumers."),
    Metric("library_loaded", "gauge", "1 with a profile library, 0 without: raw and lossless only."),
)
BY_NAME = {metric.name: metric for metric in METRICS}
