"""Several prefill servers and several decode servers of the real engine: any of the ones with any of the others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

import vllm_servers as servers
from kvserve_hf.convert import smollm2
from vllm_servers import MODEL, Process

SETTINGS = {"deadline": "30s", "lease": "30s"}
ARGUMENTS = ("--dtype", "float32", "--max-num-seqs", "16", "--num-gpu-blocks-override", "160")
ROLES = ("kv_producer", "kv_producer", "kv_consumer", "kv_consumer")
PROMPTS = [f"{'The hills were quiet that year. ' * (i % 5)}Here is what I know of number {i}:" for i in range(12)]
OFFER = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.fixture(scope="module")
def everyone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Process]]:
    """Two prefill servers, then two decode servers."""
    folder, started = tmp_path_factory.mktemp("many"), []
    try:
        for role in ROLES:
            started.append(servers.engine(smollm2(), folder, role, SETTINGS, arguments=ARGUMENTS))
        yield [server.wait() for server in started]
    finally:
        for server in started:
            server.close()


def ask(url: str, prompt: str, tokens: int, **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True} | more
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=240, trust_env=False)
    return dict(answer.raise_for_status().json())


def text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


def loaded(server: Process) -> float:
    """Tokens whose KV it was sent."""
    return server.total("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")


def encoded(server: Process) -> float:
    """Transfers that it has told of."""
    return server.total("kvserve:encode_seconds_count")


def told_more(server: Process, was: float) -> bool:
    """An engine tells of a transfer's end in its next step, which this request brings."""
    ask(server.url, "step", 1)
    return encoded(server) > was


def test_any_prefill_server_serves_any_decode_server(everyone: list[Process]) -> None:
    prefills, decodes = everyone[:2], everyone[2:]
    expected = [text(ask(decodes[0].url, prompt, 8, cache_salt="alone")) for prompt in PROMPTS]
    for (first, second), prompt, wanted in zip(itertools.product(prefills, decodes), PROMPTS, expected, strict=False):
        before = loaded(second)
        params = ask(first.url, prompt, 1, kv_transfer_params=OFFER)["kv_transfer_params"]
        assert text(ask(second.url, prompt, 8, kv_transfer_params=params, cache_salt="pairs")) == wanted
        assert loaded(second) > before


def test_a_proxy_before_all_of_them_uses_all_of_them(everyone: list[Process], tmp_path: Path) -> None:
    prefills, decodes = everyone[:2], everyone[2:]
    prompts = [f"Once more. {prompt}" for prompt in PROMPTS]
    expected = [text(ask(decodes[0].url, prompt, 8, cache_salt="alone")) for prompt in prompts]
    before = [loaded(decode) for decode in decodes]
    sent = [encoded(server) for server in prefills]
    proxy = servers.proxy(prefills, decodes, tmp_path).wait()
    try:
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(lambda prompt: text(ask(proxy.url, prompt, 8)), prompts))
        assert answers == expected
        assert proxy.total("kvserve_proxy_alone_total") == 0
    finally:
        proxy.close()
    assert all(loaded(decode) > was for decode, was in zip(decodes, before, strict=True))
    for server, was in zip(prefills, sent, strict=True):
        servers.wait_until(partial(told_more, server, was))
