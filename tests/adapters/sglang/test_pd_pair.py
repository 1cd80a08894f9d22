"""A prefill and a decode server of the real SGLang: the tokens and logprobs of one aggregated server, and no leak."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
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


def test_a_client_of_the_router_that_goes_away_harms_nobody(pair: Pair, logs: Path, expected: list[Answer]) -> None:
    router = servers.start_router(*pair, logs)
    with servers.running(router), ThreadPoolExecutor(4) as pool:
        others = [pool.submit(servers.generate, router, text) for text in PROMPTS]
        for _ in range(3):
            with pytest.raises(requests.Timeout):
                asked(router, PROMPTS[3], 2000, timeout_s=0.5)
        assert [other.result()[0] for other in others] == [tokens for tokens, _ in expected]
    nothing_left(*pair)
    servers.check_close(*pair, expected)


def asked(server: Server, text: str, tokens: int, timeout_s: float = 120.0) -> requests.Response:
    """The answer to a client that waits no longer than ``timeout_s``."""
    return requests.post(f"{server.url}/generate", json=servers.body(text, tokens), timeout=timeout_s)


def nothing_left(prefill: Server, decode: Server, seconds: float = 120.0) -> None:
    """No request, no transfer, no byte that is held for consumers and no token in SGLang's own pools any more.

    An idle SGLang says what its pool holds every 30 s. What its prefix cache may evict does not count.
    """
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
        "tokens in the prefill side's pool": value(sent, "sglang:num_used_tokens"),
        "tokens in the decode side's pool": value(got, "sglang:num_used_tokens"),
    }
    return {name: count for name, count in every.items() if count}


SLOW = {"KVSERVE_TRANSPORT__TCP__MAX_BANDWIDTH": "4Mbps"}
"""Of a prefill server whose transfers take seconds, so that a kill meets them."""


def test_a_prefill_server_that_is_killed_while_it_sends_fails_its_requests_and_no_others(
    pair: Pair, model: Path, logs: Path, expected: list[Answer]
) -> None:
    prefill, decode = pair
    doomed = servers.start_prefill(model, logs, "prefill-doomed", PLAIN, "--enable-metrics", **SLOW)
    with ExitStack() as stack:
        stack.enter_context(servers.running(doomed))
        router = servers.start_router(doomed, decode, logs, "--disable-retries")
        stack.enter_context(servers.running(router))
        pool = stack.enter_context(ThreadPoolExecutor(3))
        other = pool.submit(servers.generate_pd, prefill, decode, PROMPTS[0], 1000)
        routed = pool.submit(asked, router, PROMPTS[3], 64)
        direct = pool.submit(servers.pd_ended, doomed, decode, servers.body(PROMPTS[2], 64))
        wait_sending(doomed)
        assert not other.done(), "the other pair's request was to be in flight"
        assert not routed.done(), routed.result().text
        doomed.kill()
        assert routed.result().status_code >= 500
        _, left = direct.result()
        assert left.result().status_code == 500
        assert re.search("Decode (handshake|transfer) failed for request", left.result().text)
        tokens, _ = other.result()
        assert tokens[: len(expected[0][0])] == expected[0][0]
    assert decode.healthy()
    servers.check_close(prefill, decode, expected)
    nothing_left(prefill, decode)


def wait_sending(prefill: Server, seconds: float = 60.0) -> None:
    """Until a prefill server has a transfer under way."""
    end = time.monotonic() + seconds
    while not value(requests.get(f"{prefill.url}/metrics", timeout=10).text, "kvserve:active", 'side="producer"'):
        assert time.monotonic() < end, f"nothing was sent within {seconds} s"
        time.sleep(0.02)
