"""A prefill and a decode server of the real SGLang: the tokens and logprobs of one aggregated server, and no leak."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
import servers
from servers import PROMPTS, Answer, Server

PLAIN = "--disable-overlap-schedule"
Pair = tuple[Server, Server]


@pytest.fixture(scope="module")
def pair(model: Path, logs: Path, expected: list[Answer]) -> Iterator[Pair]:
    del expected  # its server comes first: memory
    prefill = servers.start_prefill(model, logs, "prefill", PLAIN, "--enable-metrics")
    decode = servers.start_decode(model, logs, "decode", PLAIN, "--enable-metrics")
    with servers.running(prefill, decode):
        yield prefill, decode


def test_page_size_1_gives_the_same_tokens_and_logprobs(pair: Pair, expected: list[Answer]) -> None:
    servers.check_same(*pair, expected)


def test_a_prompt_that_the_prefill_has_cached_does_too(pair: Pair, expected: list[Answer]) -> None:
    servers.check_close(*pair, expected)  # all but its last token is sent before the forward pass
    assert f"#cached-token: {len(PROMPTS[3]) - 1}," in pair[0].log.read_text()


def test_a_decode_server_that_loads_zeros_gives_other_tokens(
    pair: Pair, model: Path, logs: Path, expected: list[Answer]
) -> None:
    """The control: without it the tests above might pass on a cache that nobody reads."""
    broken = servers.start_decode(model, logs, "decode-zero", PLAIN, KVSERVE_FAULT="zero")
    with servers.running(broken):
        for text, wanted in zip(PROMPTS, expected, strict=True):
            tokens, _ = servers.generate_pd(pair[0], broken, text)
            assert tokens[0] == wanted[0][0], "the first token is the prefill's"
            assert tokens != wanted[0]


def test_metrics_are_in_sglangs_endpoint(pair: Pair, expected: list[Answer]) -> None:
    servers.check_close(*pair, expected)
    sent, got = (requests.get(f"{server.url}/metrics", timeout=10).text for server in pair)
    assert value(sent, "kvserve:transfers_total", 'side="producer"', 'ok="true"') >= len(PROMPTS)
    assert value(got, "kvserve:transfers_total", 'side="consumer"', 'ok="true"') >= len(PROMPTS)
    assert 0 < value(sent, "kvserve:wire_bytes_total") < value(sent, "kvserve:raw_bytes_total")
    assert value(got, "kvserve:external_tokens_total") >= sum(map(len, PROMPTS))
    assert value(sent, "kvserve:decisions_total", "profile=") >= len(PROMPTS)


def value(text: str, name: str, *labels: str) -> float:
    lines = [line for line in text.splitlines() if line.startswith(name) and all(label in line for label in labels)]
    assert lines, f"no series {name!r} with {labels}"
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_sixteen_requests_at_once_through_sglangs_router_are_all_right(
    pair: Pair, logs: Path, expected: list[Answer]
) -> None:
    order = [i % len(PROMPTS) for i in range(16)]
    router = servers.start_router(*pair, logs)
    with servers.running(router), ThreadPoolExecutor(16) as pool:
        got = list(pool.map(lambda i: servers.generate(router, PROMPTS[i]), order))
    assert [tokens for tokens, _ in got] == [expected[i][0] for i in order]
    nothing_left(*pair)


def test_a_client_that_goes_away_harms_nobody(pair: Pair, expected: list[Answer]) -> None:
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(servers.generate_pd, *pair, text) for text in PROMPTS]
        for _ in range(3):
            with pytest.raises(requests.Timeout):
                servers.pd(*pair, servers.body(PROMPTS[3], 2000), timeout_s=0.5)
        for other, wanted in zip(others, expected, strict=True):
            servers.assert_close(other.result(), wanted)
    nothing_left(*pair)
    servers.check_close(*pair, expected)


def nothing_left(prefill: Server, decode: Server, seconds: float = 60.0) -> None:
    """No request, no transfer and no byte that is held for consumers any more."""
    end = time.monotonic() + seconds
    while left := held(prefill, decode):
        assert time.monotonic() < end, f"left after {seconds} s: {left}"
        time.sleep(0.5)


def held(prefill: Server, decode: Server) -> dict[str, float]:
    """What is not 0 of what both sides hold."""
    sent, got = (requests.get(f"{server.url}/metrics", timeout=10).text for server in (prefill, decode))
    every = {
        "published bytes": value(sent, "kvserve:published_bytes"),
        "active on the prefill side": value(sent, "kvserve:active", 'side="producer"'),
        "active on the decode side": value(got, "kvserve:active", 'side="consumer"'),
    }
    return {name: count for name, count in every.items() if count}


def test_a_killed_prefill_server_fails_its_requests_and_the_decode_server_goes_on(
    pair: Pair, model: Path, logs: Path, expected: list[Answer]
) -> None:
    prefill, decode = pair
    with ThreadPoolExecutor(2) as pool:
        doomed = [pool.submit(servers.pd_ended, prefill, decode, servers.body(text, 500)) for text in PROMPTS[2:]]
        time.sleep(0.05)
        prefill.kill()
        for both in doomed:
            killed, left = both.result()
            assert isinstance(killed.exception(), requests.ConnectionError)
            assert left.result().status_code == 500
            assert re.search("Decode (handshake|transfer) failed for request", left.result().text)
    assert decode.healthy()
    another = servers.start_prefill(model, logs, "prefill-2", PLAIN, "--enable-metrics")
    with servers.running(another):
        servers.check_close(another, decode, expected)
        nothing_left(another, decode)
