"""The bodies of the two steps, made from the client's, and what their answers hold.

``kv_transfer_params`` is ``{"do_remote_prefill": bool, "do_remote_decode": bool, "kvserve": {...}}``. In ``kvserve``:
to the prefill server ``transfer_id``, ``workload``, ``slo``, ``min_quality`` and ``peer`` (the PeerInfo of the
consumer, where known); from its answer to the decode server all that it holds, ``locator`` above all. A request with
``describe`` is answered with the server's ``peer``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

import httpx

from kvserve_core.errors import ConfigError
from kvserve_vllm.proxy.service import HEADERS, Service

Body = dict[str, Any]
PARAMS = "kv_transfer_params"
PREFILL_DROPS = ("stream_options", "min_tokens", "logprobs", "top_logprobs", "echo", "n", "best_of")
"""Fields of no use to a step whose one token nobody sees; some contradict ``max_tokens = 1``."""


def parsed(raw: bytes) -> Body:
    """A request body.

    Raises:
        ConfigError: it is no JSON object, or carries what only this proxy may set.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ConfigError(f"the body must be a JSON object, got {type(body).__name__}")
    if body.get(PARAMS) is not None:  # it could name addresses for the decode server to fetch from
        raise ConfigError(f"is set by the proxy; leave it out, and use {', '.join(HEADERS)}", PARAMS)
    if not isinstance(body.get("cache_salt"), str | None):
        raise ConfigError("must be text", "cache_salt")
    return body


def alone(body: Mapping[str, Any]) -> str | None:
    """Why a request is one for the decode server alone, or None. A transfer is the KV of one prompt."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) != 1 and not all(isinstance(t, int) for t in prompt):
        return "several_prompts"
    if body.get("use_beam_search"):  # one request of the engine for each beam and token
        return "beam_search"
    if body.get("prompt_logprobs") is not None or (body.get("echo") and body.get("logprobs")):
        return "prompt_logprobs"  # they come from computing the prompt
    return None


def prefill_body(body: Mapping[str, Any], service: Service, peer: Mapping[str, Any] | None) -> Body:
    """Step one: compute the prompt and one token, and offer the KV under a fresh transfer id."""
    kept: Body = {name: value for name, value in body.items() if name not in PREFILL_DROPS}
    if "max_completion_tokens" in kept:
        kept["max_completion_tokens"] = 1
    mine: dict[str, Any] = {"transfer_id": uuid4().hex} | service.params()
    if peer is not None:
        mine["peer"] = peer
    params = {"do_remote_prefill": False, "do_remote_decode": True, "kvserve": mine}
    return kept | {"max_tokens": 1, "stream": False, PARAMS: params}


def offer_of(answer: httpx.Response) -> dict[str, Any] | None:
    """What step one's answer holds for the decode server, or None: there is no locator in it."""
    table = _kvserve(answer)
    return table if isinstance(table.get("locator"), dict) else None


def decode_body(body: Mapping[str, Any], service: Service, offer: Mapping[str, Any] | None) -> Body:
    """Step two: the client's body, salted by quality class, with what the prefill server offers, if anything."""
    salted = dict(body) | {"cache_salt": service.salt(body.get("cache_salt"))}
    if offer is None:
        return salted
    mine = service.params() | dict(offer)
    return salted | {PARAMS: {"do_remote_prefill": True, "do_remote_decode": False, "kvserve": mine}}


def describe_body(model: str) -> Body:
    """Asks a server for its PeerInfo; any model has a token 1."""
    params = {"do_remote_prefill": False, "do_remote_decode": False, "kvserve": {"describe": True}}
    return {"model": model, "prompt": [1], "max_tokens": 1, PARAMS: params}


def peer_of(answer: httpx.Response) -> dict[str, Any] | None:
    """The PeerInfo in the answer to :func:`describe_body`, or None where the server knows no such question."""
    peer = _kvserve(answer).get("peer")
    return peer if isinstance(peer, dict) else None


def _kvserve(answer: httpx.Response) -> dict[str, Any]:
    try:
        found: object = answer.json()
    except ValueError:
        return {}
    for key in (PARAMS, "kvserve"):
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}
