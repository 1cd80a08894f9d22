"""What travels with a request in ``kv_transfer_params``, and what comes back.

``do_remote_decode`` asks the prefill engine to offer the prompt's KV, ``do_remote_prefill`` the decode engine to fetch
it: the words of vLLM's own connectors, so that their routers work. Ours is the table ``kvserve``:

- to prefill, all optional: ``transfer_id``, ``workload``, ``slo``, ``min_quality``, ``peer`` (the consumer's PeerInfo)
- from prefill to decode, unread by the router: ``locator``, ``prompt`` (a digest of what was prefilled)
- ``describe: true`` to any engine: the answer holds ``peer``, which a router may then name to prefill engines
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from blake3 import blake3

from kvserve_core.errors import ConfigError
from kvserve_core.peer import PeerInfo
from kvserve_core.requests import RequestOptions
from kvserve_core.transport import Locator

TABLE = "kvserve"
MAX_ENDPOINTS = 128
"""More ranks than a prefill engine has: what they hold is worked out for each fetch."""


@dataclass(frozen=True)
class TransferParams:
    """The ``kv_transfer_params`` of one request."""

    offer: bool = False
    fetch: bool = False
    describe: bool = False
    transfer_id: str = ""
    options: RequestOptions = field(default_factory=RequestOptions)
    peer: PeerInfo | None = None
    locator: Locator | None = None
    prompt: str | None = None

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None) -> TransferParams:
        """From the request; a table of another connector gives defaults.

        Raises:
            ConfigError: the path names the key that is wrong.
        """
        if not given:
            return cls()
        if not isinstance(given, Mapping):
            raise ConfigError(f"must be a table, got {type(given).__name__}", "kv_transfer_params")
        table = given.get(TABLE) or {}
        if not isinstance(table, Mapping):
            raise ConfigError(f"must be a table, got {type(table).__name__}", f"kv_transfer_params.{TABLE}")
        locator = _read(table, "locator", Locator)
        if locator is not None and len(locator.endpoints) > MAX_ENDPOINTS:
            raise ConfigError(
                f"has {len(locator.endpoints)} endpoints, one for each rank; at most {MAX_ENDPOINTS} are read",
                f"kv_transfer_params.{TABLE}.locator",
            )
        return cls(
            offer=given.get("do_remote_decode") is True,
            fetch=given.get("do_remote_prefill") is True and locator is not None,
            describe=table.get("describe") is True,
            transfer_id=_text(table, "transfer_id") or uuid.uuid4().hex,
            options=RequestOptions.parse(table),
            peer=_read(table, "peer", PeerInfo),
            locator=locator,
            prompt=_text(table, "prompt"),
        )


def answer(locator: Locator, prompt: str | None) -> dict[str, Any]:
    """What the prefill engine returns: handed to the decode engine as it is."""
    table = {"locator": msgspec.to_builtins(locator), "prompt": prompt}
    return {"do_remote_prefill": True, "do_remote_decode": False, TABLE: table}


def description(peer: PeerInfo) -> dict[str, Any]:
    """What an engine says of itself when asked to ``describe``."""
    return {TABLE: {"peer": json.loads(msgspec.json.encode(peer))}}


def prompt_digest(request: Any) -> str | None:
    """What the prompt's KV depends on: tokens, LoRA adapter, images. None for prompts given as embeddings."""
    if request.prompt_token_ids is None:
        return None
    lora = request.lora_request.lora_name if request.lora_request else ""
    media = [feature.identifier for feature in request.mm_features or ()]
    text = json.dumps([list(request.prompt_token_ids), lora, media], separators=(",", ":"))
    return blake3(text.encode()).hexdigest()[:32]


def _read(table: Mapping[str, Any], key: str, kind: type[Any]) -> Any:
    if table.get(key) is None:
        return None
    try:
        return msgspec.convert(table[key], kind)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error), f"kv_transfer_params.{TABLE}.{key}") from error


def _text(table: Mapping[str, Any], key: str) -> str | None:
    value = table.get(key)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"must be text, got {type(value).__name__}", f"kv_transfer_params.{TABLE}.{key}")
    return value or None
