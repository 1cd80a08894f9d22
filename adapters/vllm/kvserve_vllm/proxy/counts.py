"""What the proxy counts, as Prometheus text. Plain numbers of one event loop, so no locks and no client library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvserve_vllm.proxy.upstream import Upstream

Labels = tuple[tuple[str, str], ...]
BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass
class Histogram:
    """Durations by bucket, with sum and count."""

    buckets: list[int] = field(default_factory=lambda: [0] * len(BUCKETS_S))
    total_s: float = 0.0
    count: int = 0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.total_s += seconds
        self.count += 1
        for i, bound in enumerate(BUCKETS_S):
            self.buckets[i] += seconds <= bound


class Counts:
    """Requests by how they ended, requests that the decode server computed alone by reason, and the two waits."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.alone: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        self.prefill_s = Histogram()
        self.first_byte_s = Histogram()

    def exposition(self, servers: Sequence[Upstream]) -> str:
        """All of it in the text format of Prometheus."""
        return "".join(line + "\n" for line in self._lines(servers))

    def _lines(self, servers: Sequence[Upstream]) -> Iterator[str]:
        yield from _family("requests_total", "counter", "Requests by how they ended.", _by("outcome", self.requests))
        about = "Requests that the decode server computed alone, by reason."
        yield from _family("alone_total", "counter", about, _by("reason", self.alone))
        yield from _family("retries_total", "counter", "Steps tried on another server.", _by("step", self.retries))
        each = [((("role", s.role), ("url", s.url)), s) for s in servers]
        about = "Whether the server is sent requests."
        yield from _family("upstream_up", "gauge", about, [(at, int(s.up)) for at, s in each])
        about = "Requests at the server now."
        yield from _family("upstream_outstanding", "gauge", about, [(at, s.outstanding) for at, s in each])
        about = "Times that the server was taken out."
        yield from _family("upstream_ejections_total", "counter", about, [(at, s.ejections) for at, s in each])
        about = "Whether the server described itself, so that producers decide for it."
        yield from _family("upstream_known", "gauge", about, [(at, int(s.peer is not None)) for at, s in each])
        yield from _histogram("prefill_seconds", "Time of the prefill step.", self.prefill_s)
        yield from _histogram("first_byte_seconds", "Time to the first byte for the client.", self.first_byte_s)


def _by(label: str, counter: Counter[str]) -> list[tuple[Labels, int]]:
    return [(((label, key),), counter[key]) for key in sorted(counter)]


def _family(name: str, kind: str, about: str, samples: Iterable[tuple[Labels, int]]) -> Iterator[str]:
    yield f"# HELP kvserve_proxy_{name} {about}"
    yield f"# TYPE kvserve_proxy_{name} {kind}"
    for labels, value in samples:
        yield f"kvserve_proxy_{name}{_labels(labels)} {value}"


def _histogram(name: str, about: str, h: Histogram) -> Iterator[str]:
    bounds = [*(format(b, "g") for b in BUCKETS_S), "+Inf"]
    yield f"# HELP kvserve_proxy_{name} {about}"
    yield f"# TYPE kvserve_proxy_{name} histogram"
    for bound, count in zip(bounds, [*h.buckets, h.count], strict=True):
        yield f'kvserve_proxy_{name}_bucket{{le="{bound}"}} {count}'
    yield f"kvserve_proxy_{name}_sum {h.total_s}"
    yield f"kvserve_proxy_{name}_count {h.count}"


def _labels(labels: Labels) -> str:
    quoted = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels)
    return f"{{{quoted}}}" if quoted else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
