"""The bodies of the two steps, made from the client's, and what their answers hold.

``kv_transfer_params`` is ``{"do_remote_prefill": bool, "do_remote_decode": bool, "kvserve": {...}}``. In ``kvserve``:
to the prefill server ``transfer_id``, ``workload``, ``slo``, ``min_quality`` and ``peer`` (the PeerInfo of the
consumer, where known); from its answer to the decode server all that it holds, ``locator`` above all. A request with
``describe`` is answered with the server's ``peer``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any
from uuid import uuid4

import httpx

from kvserve_core.errors import ConfigError
from kvserve_vllm.proxy.service import HEADERS, Service

Body = dict[str, Any]
Written = Mapping[str, bytes]
PARAMS = "kv_transfer_params"
MAX_DEPTH = 128
"""Levels of a body; no request has nearly as many."""
REFUSED = f"is set by the proxy; leave it out, and use {', '.join(HEADERS)}"
PREFILL_DROPS = ("stream_options", "min_tokens", "logprobs", "top_logprobs", "echo", "n", "best_of")
"""Fields of no use to a step whose one token nobody sees; some contradict ``max_tokens = 1``."""


def parsed(raw: bytes) -> Body:
    """A request body.

    Raises:
        ConfigError: it is no JSON object, or carries what only this proxy may set.
    """
    try:
        body = json.loads(raw, parse_constant=_no_number, parse_float=_finite)
        if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH:
            _check_depth(body)
        if b"\\u" in raw or not raw.isascii():
            sendable(body)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ConfigError(f"the body must be a JSON object, got {type(body).__name__}")
    if _may_name_params(raw):
        _check_params(body)
    if not isinstance(body.get("cache_salt"), str | None):
        raise ConfigError("must be text", "cache_salt")
    return body


def check_passed(raw: bytes) -> None:
    """A body on its way to a decode server as it is, of whatever kind.

    Raises:
        ConfigError: it carries what only this proxy may set.
    """
    if not _may_name_params(raw):
        return
    try:
        _check_params(json.loads(raw))
    except RecursionError:
        raise ConfigError("the body is nested too deeply") from None
    except ValueError:
        if PARAMS.encode() in raw:  # what is no JSON to us may be to the server
            raise ConfigError(REFUSED, PARAMS) from None


def _may_name_params(raw: bytes) -> bool:
    """False where it certainly does not; escapes and other encodings of Unicode hide it."""
    return PARAMS.encode() in raw or b"\\u" in raw or b"\0" in raw or not raw.isascii()


def _check_params(body: object) -> None:
    """It could name addresses for the decode server to fetch from, at any depth: routes differ in where they look."""
    left = [body]
    while left:
        found = left.pop()
        if isinstance(found, dict) and found.get(PARAMS) is not None:
            raise ConfigError(REFUSED, PARAMS)
        left += _inner(found)


def _check_depth(body: object) -> None:
    """What is read from a shallow stack may not be written from a deeper one."""
    level = _inner(body)
    for _ in range(MAX_DEPTH):
        if not level:
            return
        level = [below for each in level for below in _inner(each)]
    raise ValueError(f"more than {MAX_DEPTH} levels")


def _inner(value: object) -> list[object]:
    """What of a value has levels of its own."""
    inside: Iterable[object] = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [each for each in inside if isinstance(each, dict | list)]


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is too large for a number")
    return value


def sendable(value: object) -> None:
    """Python reads more than JSON allows, NaN and lone surrogates for example, which cannot be sent on.

    Raises:
        ValueError, RecursionError: it is such a value.
    """
    json.dumps(value, allow_nan=False, ensure_ascii=False).encode()


def alone(body: Mapping[str, Any]) -> str | None:
    """Why a request is one for the decode server alone, or None. A transfer is the KV of one prompt."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) != 1 and not isinstance(next(iter(prompt), None), int):
        return "several_prompts"
    if body.get("use_beam_search"):  # one request of the engine for each beam and token
        return "beam_search"
    if body.get("prompt_logprobs") is not None or (body.get("echo") and body.get("logprobs")):
        return "prompt_logprobs"  # they come from computing the prompt
    return None


def written(body: Mapping[str, Any]) -> Written:
    """A client's body, field by field as JSON: both steps send nearly all of it, and it may be long."""
    return {name: _json(value) for name, value in body.items()}


def prefill_content(body: Written, service: Service, peer: Mapping[str, Any] | None) -> bytes:
    """Step one: compute the prompt and one token, and offer the KV under a fresh transfer id."""
    kept = {name: value for name, value in body.items() if name not in PREFILL_DROPS}
    tokens = {name: 1 for name in ("max_tokens", "max_completion_tokens") if name in kept or name == "max_tokens"}
    mine: dict[str, Any] = {"transfer_id": uuid4().hex} | service.params()
    if peer is not None:
        mine["peer"] = peer
    params = {"do_remote_prefill": False, "do_remote_decode": True, "kvserve": mine}
    return _joined(kept, {**tokens, "stream": False, PARAMS: params})


def offer_of(answer: httpx.Response) -> dict[str, Any] | None:
    """What step one's answer holds for the decode server, or None: there is no locator in it."""
    table = _kvserve(answer)
    return table if isinstance(table.get("locator"), dict) else None


def decode_content(body: Written, service: Service, own_salt: str | None, offer: Mapping[str, Any] | None) -> bytes:
    """Step two: the client's body, salted by quality class, with what the prefill server offers, if anything."""
    salt = {"cache_salt": service.salt(own_salt)}
    if offer is None:
        return _joined(body, salt)
    mine = service.params() | dict(offer)
    params = {"do_remote_prefill": True, "do_remote_decode": False, "kvserve": mine}
    return _joined(body, {**salt, PARAMS: params})


def _joined(kept: Written, ours: Mapping[str, Any]) -> bytes:
    """One object of a client's fields and ours, which win."""
    fields = {**kept, **written(ours)}
    return b"{" + b",".join(_json(name) + b":" + value for name, value in fields.items()) + b"}"


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


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
        _check_depth(found)
        sendable(found)
    except (ValueError, RecursionError):
        return {}
    for key in (PARAMS, "kvserve"):
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}
