"""Names of cached prefixes: one key per whole cell, a chain over everything that the values depend on. No torch.

A cell's key covers all tokens up to its end, so that equal keys mean equal caches; what else they depend on (weights,
adapters, images, scales of a quantized cache, the tensor-parallel rank) goes into the namespace. Engines that serve the
same model make equal keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from struct import pack

from blake3 import blake3

from kvserve_core.errors import ConfigError, UnsupportedSpecError
from kvserve_core.spec import SEGMENT_TOKENS, KVSpec, Shard

CLASSES = (1.0, 0.999, 0.995, 0.99, 0.98, 0.95, 0.9, 0.0)
"""Lowest quality of each class, best first; 1.0 is exact."""
KEY_CHARS = 40


def quality_class(quality: float, exact: bool = False) -> float:
    """The class that a profile's lower quality bound falls into; only an exact one is of class 1.0."""
    if exact:
        return 1.0
    return next(lowest for lowest in CLASSES[1:] if quality >= lowest or lowest == 0.0)


def classes_for(min_quality: float) -> tuple[float, ...]:
    """The classes that may serve a request, best first."""
    return tuple(lowest for lowest in CLASSES if lowest >= min_quality or lowest == 1.0)


def namespace(kv: KVSpec, shard: Shard, **depends_on: str | int | None) -> str:
    """What every key of a deployment starts from: the model's fingerprint, the rank, and what the adapter adds
    (``lora``, ``salt``, ``mm``, ``kv_scales`` ...); None is left out."""
    given = {name: value for name, value in sorted(depends_on.items()) if value is not None}
    return json.dumps([kv.fingerprint, shard.rank, shard.size, list(shard.layers), given], separators=(",", ":"))


def cell_keys(tokens: Sequence[int], space: str, *, per_token: Mapping[int, str] | None = None) -> list[str]:
    """One key for each whole cell of a prompt.

    per_token: what stands at a position beside its token id, such as the hash of an image that begins there.

    Raises:
        ConfigError: a token id that does not fit into 64 bits.
    """
    extra = per_token or {}
    digest = blake3(space.encode()).digest()
    keys = []
    for start in range(0, len(tokens) // SEGMENT_TOKENS * SEGMENT_TOKENS, SEGMENT_TOKENS):
        cell = tokens[start : start + SEGMENT_TOKENS]
        beside = [[i - start, extra[i]] for i in sorted(extra) if start <= i < start + SEGMENT_TOKENS]
        digest = blake3(digest + _packed(cell) + json.dumps(beside).encode()).digest()
        keys.append(digest.hex()[:KEY_CHARS])
    return keys


def stored_key(key: str, quality: float) -> str:
    """The name of a cell in a store, at the quality class it was written with."""
    return f"{key}-q{round(quality * 1000):04d}"


def check_storable(kv: KVSpec) -> None:
    """A prefix can be kept only where every layer's cache is one of tokens.

    Raises:
        UnsupportedSpecError: the model has state layers.
    """
    for group in kv.groups:
        if group.unit == "state":
            raise UnsupportedSpecError(
                f"layers {group.layers} hold a state of the whole request, so its prefixes cannot be stored cell by"
                " cell; turn the store off for this model"
            )


def _packed(tokens: Sequence[int]) -> bytes:
    try:
        return pack(f"<{len(tokens)}q", *tokens)
    except Exception as error:  # struct.error is no subclass of ValueError
        raise ConfigError(f"token ids must be integers of 64 bits: {error}") from error
