"""The links of the demo. The limit is a token bucket in the producer's transport; the controller never sees it."""

from __future__ import annotations

from dataclasses import dataclass

from kvserve_core.units import format_bandwidth, parse_bandwidth

WRONG = 10.0
"""The controller's prior is off by this factor."""


@dataclass(frozen=True)
class Link:
    """A bandwidth in bytes/s (None: as fast as loopback goes) and the prior that the controller starts with."""

    bytes_per_s: float | None
    prior_bytes_per_s: float

    @property
    def name(self) -> str:
        """``20 Mbps`` or ``unlimited``."""
        return format_bandwidth(self.bytes_per_s)

    @property
    def bits_per_s(self) -> float | None:
        """The limit in bit/s, None when there is none."""
        return None if self.bytes_per_s is None else self.bytes_per_s * 8


def _link(text: str, factor: float) -> Link:
    bandwidth = parse_bandwidth(text)
    return Link(bandwidth, bandwidth * factor)


def default_links() -> list[Link]:
    """Slow links with a prior that is too high, fast ones with a prior that is too low."""
    loopback = parse_bandwidth("8Gbps")
    return [
        _link("20Mbps", WRONG),
        _link("200Mbps", WRONG),
        _link("2Gbps", 1 / WRONG),
        Link(None, loopback / WRONG),
    ]
