"""One streaming request over a pair, and what it cost on the wire."""

from __future__ import annotations

import json
import random
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
import servers
from servers import Server

OUTPUT_TOKENS = 4
TEXT = "The committee met on a {} to settle the question of {} and, after {} hours, agreed on {}. "
WORDS = ("Monday", "harbour", "seven", "timber", "winter", "railway", "copper", "silence", "twelve", "orchards")


@dataclass(frozen=True)
class Pair:
    """Two servers. options: what a request says to kvserve."""

    prefill: Server
    decode: Server
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Timed:
    """One request: of its prompt, and until its first token."""

    tokens: int
    ttft_s: float
    wire_bytes: int


def prompt(seed: int, sentences: int) -> str:
    """A text that no other seed shares a prefix with."""
    chosen = random.Random(seed)
    return f"{seed}. " + "".join(TEXT.format(*(chosen.choice(WORDS) for _ in range(4))) for _ in range(sentences))


def ask(pair: Pair, text: str) -> Timed:
    """Send one request to both servers, as a router does; seconds and bytes until the first token."""
    room = random.getrandbits(62)
    at = {"bootstrap_host": "127.0.0.1", "bootstrap_port": pair.prefill.bootstrap_port, "bootstrap_room": room}
    options = {"custom_params": {"kvserve": dict(pair.options)}} if pair.options else {}
    body = servers.body(text, OUTPUT_TOKENS, **options) | at
    before, started = sent_bytes(), time.perf_counter()
    other = threading.Thread(target=requests.post, args=(f"{pair.prefill.url}/generate",), kwargs={"json": body})
    other.start()
    with requests.post(f"{pair.decode.url}/generate", json=body | {"stream": True}, stream=True, timeout=300) as got:
        got.raise_for_status()
        first = json.loads(next(line for line in got.iter_lines() if line.startswith(b"data: {"))[6:])
        ttft_s, wire_bytes = time.perf_counter() - started, sent_bytes() - before
        for _ in got.iter_lines():
            pass
    other.join()
    if "meta_info" not in first:
        raise RuntimeError(f"the request failed: {first}\n{pair.decode.tail()}\n{pair.prefill.tail()}")
    return Timed(first["meta_info"]["prompt_tokens"], round(ttft_s, 4), wire_bytes)


def sent_bytes() -> int:
    """What the loopback of this network namespace has sent so far."""
    lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()
    fields = next(line.partition(":")[2].split() for line in lines if line.strip().startswith("lo:"))
    return int(fields[8])


def tokens_of(rounds: Mapping[str, Sequence[Timed]]) -> int:
    """Of a typical prompt."""
    return round(statistics.median(each.tokens for taken in rounds.values() for each in taken))
