"""A decode server that reuses what arrived for other requests, and so may hold a whole prompt already."""

from __future__ import annotations

from pathlib import Path

import servers

PAGED = ("--page-size", "16", "--disable-overlap-schedule")
SHARED = ("--disaggregation-decode-enable-radix-cache",)
WHOLE = "the quick brown fox jumps over the lazy dog, again and again. .."
"""Of 64 tokens: whole pages, so that none is left to send the second time."""


def test_a_prompt_that_the_decode_server_holds_is_answered_again(model: Path, logs: Path) -> None:
    assert len(WHOLE) == 64
    prefill = servers.start_prefill(model, logs, "shared-prefill", *PAGED)
    decode = servers.start_decode(model, logs, "shared-decode", *PAGED, *SHARED)
    with servers.running(prefill, decode):
        first = servers.generate_pd(prefill, decode, WHOLE)
        again = [servers.generate_pd(prefill, decode, WHOLE) for _ in range(2)]
        assert len(set(first[0])) > 10, "the model's tokens are degenerate"
        for answer in again:
            servers.assert_close(answer, first)
        assert decode.healthy()
