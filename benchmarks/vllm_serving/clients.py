"""Clients that take both steps themselves, so that they can name a consumer that is not the real one."""

from __future__ import annotations

import itertools
import random
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

import vllm_servers as servers
from vllm_servers import MODEL, Process, wait_until
from vllm_serving.timed import Timed, named

PROMPT_TOKENS, OUTPUT_TOKENS = 1500, 16


class Clients:
    """Asks the servers in both steps itself, so that it can name a consumer that is not the real one."""

    def __init__(self, decode: Process, prompts: Iterator[list[int]]) -> None:
        self.decode, self.prompts = decode, prompts
        # A server closes a connection that was idle for some seconds, perhaps just when it is used again.
        limits = httpx.Limits(max_keepalive_connections=0)
        self.http = httpx.Client(timeout=600, trust_env=False, limits=limits)
        self.peer = self._described()

    def _described(self) -> dict[str, Any]:
        params = {"kvserve": {"describe": True}}
        body = {"model": MODEL, "prompt": [1], "max_tokens": 1, "kv_transfer_params": params}
        answer = self.http.post(f"{self.decode.url}/v1/completions", json=body)
        return dict(answer.raise_for_status().json()["kv_transfer_params"]["kvserve"]["peer"])

    def known(self, link: str, raw: bool) -> dict[str, Any]:
        """The consumer under the name of a link; a link that carries raw transfers only has a name of its own."""
        return named(self.peer, f"{link}-raw" if raw else link, raw)

    def offered(self, prefill: Process, prompt: list[int], peer: Mapping[str, Any]) -> dict[str, Any]:
        """Step one: the params for the decode server."""
        table = {"transfer_id": uuid.uuid4().hex, "peer": peer}
        params = {"do_remote_decode": True, "do_remote_prefill": False, "kvserve": table}
        body = body_of(prompt, 1) | {"kv_transfer_params": params}
        answer = self.http.post(f"{prefill.url}/v1/completions", json=body)
        return dict(answer.raise_for_status().json()["kv_transfer_params"])

    def gaps(self, prompt: list[int], tokens: int, params: Mapping[str, Any] | None = None) -> list[float]:
        """Seconds to each token from the moment of asking the decode server."""
        body = body_of(prompt, tokens) | {"stream": True} | ({"kv_transfer_params": params} if params else {})
        started = time.perf_counter()
        with self.http.stream("POST", f"{self.decode.url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
            return [time.perf_counter() - started for _ in lines]

    def timed(self, way: str, prefill: Process, link: str) -> Timed:
        """One request: ``kvserve``, ``raw`` or ``recompute``."""
        prompt = next(self.prompts)
        if way == "recompute":
            seen = self.gaps(prompt, OUTPUT_TOKENS)
            return Timed(way, seen[0], seen[-1])
        before, encoded = self.decode.metrics(), prefill.total("kvserve:encode_seconds_sum")
        started = time.perf_counter()
        params = self.offered(prefill, prompt, self.known(link, way == "raw"))
        prefill_s = time.perf_counter() - started
        seen = self.gaps(prompt, OUTPUT_TOKENS, params)
        counted = self._counted(before)
        counted["encode_s"] = self._heard(prefill, encoded)
        profile = params["kvserve"]["locator"]["profile"]
        return Timed(way, prefill_s + seen[0], prefill_s + seen[-1], prefill_s, profile, **counted)

    def _heard(self, prefill: Process, before: float) -> float:
        """Seconds of encoding. An engine hears of a transfer's end in its next step, which this request brings."""
        wait_until(lambda: self._stepped(prefill).total("kvserve:encode_seconds_sum") > before)
        return prefill.total("kvserve:encode_seconds_sum") - before

    def _stepped(self, server: Process) -> Process:
        self.http.post(f"{server.url}/v1/completions", json=body_of([1], 1)).raise_for_status()
        return server

    def _counted(self, before: Mapping[str, float]) -> dict[str, float]:
        """What was added at the decode server; its gauges and sums move a moment after the answer."""
        wait_until(lambda: more(before, self.decode.metrics(), "kvserve:load_seconds_count") == 1)
        now = self.decode.metrics()
        names = {"raw_bytes": "raw_bytes_total", "wire_bytes": "wire_bytes_total"}
        names |= {f"{step}_s": f"{step}_seconds_sum" for step in ("transfer", "decode", "load")}
        return {field: more(before, now, f"kvserve:{name}") for field, name in names.items()}


def more(before: Mapping[str, float], now: Mapping[str, float], name: str) -> float:
    return servers.total(now, name) - servers.total(before, name)


def body_of(prompt: list[int], tokens: int) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def prompts(model: Path) -> Iterator[list[int]]:
    """Passages of installed documentation, each with a first word of its own, so that no prefix is cached."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    source = random.Random(0)
    texts = [
        p.read_text(errors="replace") for p in sorted(Path(httpx.__file__).parents[1].rglob("*.dist-info/METADATA"))
    ]
    tokens = tokenizer("\n".join(text for text in texts if len(text) > 3000))["input_ids"]
    for number in itertools.count():
        at = source.randrange(len(tokens) - PROMPT_TOKENS)
        head = tokenizer(f"{number} ")["input_ids"]
        yield [*head, *tokens[at : at + PROMPT_TOKENS - len(head)]]
