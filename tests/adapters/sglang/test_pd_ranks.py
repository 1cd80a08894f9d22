"""Tensor-parallel servers of the real SGLang, in every combination of one and two ranks."""

from __future__ import annotations

from pathlib import Path

import servers
from servers import Answer

PLAIN = "--disable-overlap-schedule"


def test_two_ranks_to_two_and_to_one(model: Path, logs: Path, expected: list[Answer]) -> None:
    prefill = servers.start_prefill(model, logs, "prefill-tp2", PLAIN, tp=2)
    with servers.running(prefill):
        for tp in (2, 1):
            decode = servers.start_decode(model, logs, f"decode-tp{tp}", PLAIN, tp=tp)
            with servers.running(decode):
                servers.check_close(prefill, decode, expected)


def test_one_rank_to_two(model: Path, logs: Path, expected: list[Answer]) -> None:
    prefill = servers.start_prefill(model, logs, "prefill-tp1", PLAIN)
    decode = servers.start_decode(model, logs, "decode-tp2", PLAIN, tp=2)
    with servers.running(prefill, decode):
        servers.check_close(prefill, decode, expected)
