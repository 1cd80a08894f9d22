"""Pages of 16 tokens, chunks of 64, and SGLang's overlap scheduling, which is its default."""

from __future__ import annotations

from pathlib import Path

import servers
from servers import Answer

PAGED = ("--page-size", "16", "--chunked-prefill-size", "64")


def test_pages_chunks_and_overlap_give_the_same_tokens_and_logprobs(
    model: Path, logs: Path, expected: list[Answer]
) -> None:
    # Under overlap SGLang sends cached prefixes early only where there are CUDA events to fence them with.
    early = {"SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0"}
    prefill = servers.start_prefill(model, logs, "paged-prefill", *PAGED, **early)
    decode = servers.start_decode(model, logs, "paged-decode", *PAGED)
    with servers.running(prefill, decode):
        servers.check_close(prefill, decode, expected)
        servers.check_close(prefill, decode, expected)
        for server in (prefill, decode):
            assert "'disable_overlap_schedule': False" in server.log.read_text()
        assert prefill.log.read_text().count("#new-token: 64,") > 10
