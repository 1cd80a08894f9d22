"""Two real SGLang servers, one after the other, that share nothing but a folder of compressed pages."""

from __future__ import annotations

from pathlib import Path

import hicache_servers
import pytest
import servers
from hicache_servers import PAGE

PROMPT = "shared system prompt: " + "the quick brown fox jumps over the lazy dog. " * 8
TOKENS = 380
TOKEN_BYTES = 4 * 2 * 4 * 64 * 4
"""Of the model's cache: layers, K and V, heads, dim, float32."""


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct"])
def test_a_cold_server_restores_a_prefix_from_compressed_files(
    layout: str, model: Path, logs: Path, tmp_path: Path
) -> None:
    prompt = PROMPT[:TOKENS]
    assert len(prompt) == TOKENS
    first = hicache_servers.start(model, logs, f"hicache-{layout}-warm", tmp_path, layout)
    with servers.running(first):
        wanted, restored = hicache_servers.generate(first, prompt)
        assert restored == 0
        files = hicache_servers.wait_stored(tmp_path, TOKENS // PAGE)
        hicache_servers.wait_counted(first, "raw_bytes", len(files) * PAGE * TOKEN_BYTES)
        moved = [hicache_servers.counted(first, name) for name in ("raw_bytes", "wire_bytes")]
        assert 0 < moved[1] < moved[0]
    assert len(set(wanted[0])) > 10, "the model's tokens are degenerate"
    assert len(files) >= TOKENS // PAGE, first.tail()
    stored, original = sum(f.stat().st_size for f in files), len(files) * PAGE * TOKEN_BYTES
    assert stored < 0.9 * original
    second = hicache_servers.start(model, logs, f"hicache-{layout}-cold", tmp_path, layout)
    with servers.running(second):
        got, restored = hicache_servers.generate(second, prompt)
        assert hicache_servers.counted(second, "external_tokens") == restored
    servers.assert_close(got, wanted)
    assert restored >= 0.9 * TOKENS, second.tail()


def test_a_store_that_gives_back_other_bytes_keeps_the_server_from_starting(
    model: Path, logs: Path, tmp_path: Path
) -> None:
    broken = hicache_servers.start(model, logs, "hicache-zero", tmp_path, KVSERVE_FAULT="zero")
    with pytest.raises(RuntimeError, match="came back from the store with other bytes"), servers.running(broken):
        pass
