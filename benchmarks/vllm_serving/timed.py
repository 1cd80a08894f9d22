"""One request that a client took both steps of, and the consumer's description that it goes under."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

RAW_ONLY = {"quantizer:identity": [1], "codec:raw": [1]}


@dataclass(frozen=True)
class Timed:
    """Seconds as the client saw them, and what the two sides counted meanwhile."""

    way: str
    ttft_s: float
    jct_s: float
    prefill_s: float = 0.0
    profile: str = ""
    raw_bytes: float = 0.0
    wire_bytes: float = 0.0
    encode_s: float = 0.0
    transfer_s: float = 0.0
    decode_s: float = 0.0
    load_s: float = 0.0


def named(peer: Mapping[str, Any], link: str, raw: bool) -> dict[str, Any]:
    """The consumer under the name of a link; with ``raw`` it reads nothing else."""
    return {**peer, "link": link} | ({"reads": RAW_ONLY} if raw else {})
