"""Two OpenAI servers of the real engine, the proxy, and clients that stream, leave and lose their producer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

import vllm_servers as servers
from kvserve_hf.convert import smollm2
from vllm_servers import MODEL, Process, wait_until

TOKENS = 12
SETTINGS = {"deadline": "20s", "lease": "20s", "transport": {"tcp": {"max_bandwidth": "400Mbps", "heartbeat": "1s"}}}
ARGUMENTS = ("--dtype", "float32", "--max-num-seqs", "32", "--num-gpu-blocks-override", "320")
SUBJECTS = (
    "sea moon bread city horse winter music law doctor bridge king computer rain garden war child market bird school"
    " mountain letter dream engine river colour teacher island number friend train metal story"
)
PROMPTS = [
    "The river rose in the night, and the old bridge was closed. " * (i % 8) + f"A fact about the {subject}: it is"
    for i, subject in enumerate(SUBJECTS.split())
]
AT_ONCE = len(PROMPTS)
UNFILLED = AT_ONCE // 8
"""Threads and files that a pool may still get: before, a few loads had ended when the last ones began. A leak would be
one for every request."""


@dataclass
class Stand:
    """A prefill server, a decode server, and the proxy before them."""

    prefill: Process
    decode: Process
    proxy: Process

    def stream(self, prompt: str, tokens: int = TOKENS, leave_after: int | None = None) -> str:
        """The text of a streamed completion; with ``leave_after`` the client is gone after so many events."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        text = ""
        with httpx.stream(
            "POST", f"{self.proxy.url}/v1/completions", json=body | {"stream": True}, timeout=240, trust_env=False
        ) as answer:
            answer.raise_for_status()
            for count, data in enumerate(_events(answer)):
                if count == leave_after:
                    break
                text += "" if data == "[DONE]" else json.loads(data)["choices"][0]["text"]
        return text

    def alone(self, prompt: str) -> str:
        """What the decode server says by itself, from a cache that no other request shares."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        return str(_ask(self.decode, body | {"cache_salt": "reference"})["choices"][0]["text"])


def _events(answer: httpx.Response) -> Iterator[str]:
    return (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: "))


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    model, folder = smollm2(), tmp_path_factory.mktemp("servers")
    started: list[Process] = []
    try:
        for role in ("kv_producer", "kv_consumer"):
            started.append(servers.engine(model, folder, role, SETTINGS, arguments=ARGUMENTS))
        prefill, decode = (server.wait() for server in started)
        started.append(servers.proxy([prefill], [decode], folder))
        made = Stand(prefill, decode, started[-1].wait())
        wait_until(lambda: all(s["known"] for s in _health(made)["servers"] if s["role"] == "decode"))
        yield made
    finally:
        for server in started:
            server.close()


@pytest.fixture(scope="module")
def expected(stand: Stand) -> list[str]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(stand.alone, PROMPTS))


@pytest.fixture(scope="module")
def held(stand: Stand, expected: list[str]) -> list[dict[str, int]]:
    """Threads and files of both servers once their pools are full."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        assert list(pool.map(stand.stream, [f"Before. {p}" for p in PROMPTS])) != expected
    return [server.held() for server in (stand.prefill, stand.decode)]


def test_many_streams_at_once_say_what_the_decode_server_alone_says(stand: Stand, expected: list[str]) -> None:
    loaded = _external(stand)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        assert list(pool.map(stand.stream, PROMPTS)) == expected
    assert len(set(expected)) > AT_ONCE // 2
    assert _external(stand) - loaded >= AT_ONCE * 10
    assert stand.proxy.total("kvserve_proxy_alone_total") == 0
    assert stand.decode.total("kvserve:fallbacks_total", rung="recompute") == 0


def test_a_router_that_only_hands_params_on_needs_to_know_nothing_of_us(stand: Stand, expected: list[str]) -> None:
    nixl = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    asked = {"do_remote_decode": True, "do_remote_prefill": False, **nixl}
    body = {"model": MODEL, "prompt": PROMPTS[3], "temperature": 0, "ignore_eos": True, "cache_salt": "other router"}
    first = _ask(stand.prefill, body | {"max_tokens": 1, "stream": False, "kv_transfer_params": asked})
    loaded = _external(stand)
    second = _ask(stand.decode, body | {"max_tokens": TOKENS, "kv_transfer_params": first["kv_transfer_params"]})
    assert second["choices"][0]["text"] == expected[3]
    assert _external(stand) - loaded > 10


def test_a_missed_slo_break_even_and_goodput_are_exported(stand: Stand) -> None:
    def told() -> dict[str, float]:
        _left(stand.prefill)  # outcomes come in with steps
        return {name: value for name, value in stand.prefill.metrics().items() if name.startswith("kvserve:")}

    def missed() -> float:
        return servers.total(told(), "kvserve:slo_misses_total")

    for _ in range(3):
        before = missed()  # many streams at once may have missed the default
    body = {"model": MODEL, "prompt": f"Soon. {PROMPTS[0]}", "max_tokens": 2}
    asked = httpx.post(
        f"{stand.proxy.url}/v1/completions", json=body, headers={"x-kvserve-slo": "1ms"}, timeout=240, trust_env=False
    )
    asked.raise_for_status()
    wait_until(lambda: missed() > before, told)
    found = told()
    assert servers.sampled(found, "kvserve:goodput_bytes_per_second") > 0
    assert servers.sampled(found, "kvserve:break_even_bytes_per_second") >= 0


def test_a_client_that_leaves_changes_nothing_for_the_others_and_leaves_nothing_behind(
    stand: Stand, held: list[dict[str, int]]
) -> None:
    with ThreadPoolExecutor(AT_ONCE + 1) as pool:
        leaver = pool.submit(stand.stream, "Tell me of the sea.", 1500, 3)
        assert list(pool.map(stand.stream, [f"{p} " for p in PROMPTS])) == _alone(stand, [f"{p} " for p in PROMPTS])
        leaver.result()
    assert stand.proxy.total("kvserve_proxy_requests_total", outcome="disconnected") == 1
    for server, before in zip((stand.prefill, stand.decode), held, strict=True):
        _nothing_left(server, before)


def test_a_killed_producer_costs_time_and_no_answer(
    stand: Stand, expected: list[str], held: list[dict[str, int]]
) -> None:
    done = threading.Semaphore(0)
    prompts = [f"Again. {p}" for p in PROMPTS]
    wanted = _alone(stand, prompts)

    def stream(prompt: str) -> str:
        text = stand.stream(prompt)
        done.release()
        return text

    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = [pool.submit(stream, prompt) for prompt in prompts]
        for _ in range(2):
            done.acquire()
        stand.prefill.kill()
        assert [answer.result() for answer in answers] == wanted
    wait_until(lambda: _health(stand)["status"] == "degraded", lambda: _health(stand))
    alone = stand.proxy.total("kvserve_proxy_alone_total")
    assert alone + stand.decode.total("kvserve:fallbacks_total", rung="recompute") > 0
    assert stand.stream(PROMPTS[0]) == expected[0]
    assert stand.proxy.total("kvserve_proxy_alone_total") > alone
    _nothing_left(stand.decode, held[1])


def _ask(server: Process, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=240, trust_env=False)
    return dict(answer.raise_for_status().json())


def _alone(stand: Stand, prompts: list[str]) -> list[str]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(stand.alone, prompts))


def _health(stand: Stand) -> dict[str, object]:
    return dict(httpx.get(f"{stand.proxy.url}/health", trust_env=False).json())


def _external(stand: Stand) -> float:
    return stand.decode.total("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")


def _nothing_left(server: Process, before: dict[str, int]) -> None:
    """No request, no block and no published byte; no more threads and open files than there were."""
    wait_until(lambda: not any(_left(server).values()), lambda: _left(server))
    allowed = {kind: number + UNFILLED for kind, number in before.items()}
    wait_until(lambda: all(server.held()[kind] <= allowed[kind] for kind in allowed), lambda: (server.held(), allowed))


def _left(server: Process) -> dict[str, float]:
    """What gauges say. They move with steps, so one is taken."""
    _ask(server, {"model": MODEL, "prompt": "Hello", "max_tokens": 1})
    found = server.metrics()
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    return {name: servers.sampled(found, name) for name in (*names, "kvserve:published_bytes")}
