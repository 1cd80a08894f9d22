"""Quality of anything that changes KV: real continuations, teacher-forced through the changed KV of a prompt.

For each text the KV of the first ``prompt_tokens`` tokens is exported, restored by what is under test and injected; the
next ``continuation_tokens`` tokens are fed through it and through the untouched KV, and the logits are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kvserve_core.errors import UnsupportedSpecError
from kvserve_core.spec import KVSpec, Region
from kvserve_hf.engine import Engine
from kvserve_hf.quality import Quality, TextQuality, compare

PROMPT_TOKENS = 768
CONTINUATION_TOKENS = 192


class Roundtrip(Protocol):
    """Compress and restore the KV of one request: ``read`` gives any region, ``total`` is its number of tokens.

    Gives restored regions in the plane's dtype. Whatever it does not give counts as not sent, which is an error
    unless no later token attends to it.
    """

    def __call__(self, read: Callable[[Region], Tensor], total: int) -> Iterable[tuple[Region, Tensor]]:
        """Regions and their restored values."""


@dataclass(frozen=True)
class TokenText:
    """A text as tokens: its first ones are the prompt, the rest the continuation."""

    name: str
    ids: tuple[int, ...]


class Bench:
    """Prefills each text once and keeps its KV and reference logits (40 MB a text at 49152 words); then measures."""

    def __init__(self, engine: Engine, texts: Sequence[TokenText], prompt_tokens: int = PROMPT_TOKENS) -> None:
        self._engine, self._texts, self._prompt_tokens = engine, tuple(texts), prompt_tokens
        self._reference: list[Tensor] = []
        for i, text in enumerate(self._texts):
            if len(text.ids) < prompt_tokens + 2:
                raise UnsupportedSpecError(
                    f"text {text.name!r} has {len(text.ids)} tokens; the prompt takes {prompt_tokens} and the"
                    " continuation at least 2"
                )
            engine.prefill(self._key(i), text.ids[:prompt_tokens])
            self._reference.append(engine.teacher_forced(self._key(i), text.ids[prompt_tokens:]))

    def run(self, roundtrip: Roundtrip, progress: Callable[[int, int], None] | None = None) -> Quality:
        """Quality of one roundtrip over all texts. ``progress(done, of)`` after each."""
        results = []
        for i in range(len(self._texts)):
            results.append(self._one(i, roundtrip))
            if progress is not None:
                progress(i + 1, len(self._texts))
        return Quality(tuple(results))

    @property
    def keys(self) -> tuple[str, ...]:
        """Transfer ids under which the engine holds the untouched KV, in the order of the texts."""
        return tuple(self._key(i) for i in range(len(self._texts)))

    def close(self) -> None:
        """Release the held KV."""
        for i in range(len(self._texts)):
            self._engine.release(self._key(i))

    def _one(self, i: int, roundtrip: Roundtrip) -> TextQuality:
        text, key = self._texts[i], f"{self._key(i)}/restored"
        rest = text.ids[self._prompt_tokens :]
        self._engine.open(key, self._prompt_tokens)
        try:
            for at, x in roundtrip(lambda at: self._engine.gather(self._key(i), at), self._prompt_tokens):
                self._engine.scatter(key, at, x)
            return compare(text.name, self._reference[i], self._engine.teacher_forced(key, rest), rest)
        finally:
            self._engine.release(key)

    def _key(self, i: int) -> str:
        return f"bench-{id(self)}-{i}"


def plane_by_plane(spec: KVSpec, change: Callable[[Region, Tensor], Tensor]) -> Roundtrip:
    """A roundtrip that hands each whole plane ``[L, H, T, D]`` to ``change``; tokens before a window are left out."""

    def roundtrip(read: Callable[[Region], Tensor], total: int) -> Iterable[tuple[Region, Tensor]]:
        for at in whole_regions(spec, total):
            yield at, change(at, read(at))

    return roundtrip


def whole_regions(spec: KVSpec, total: int) -> list[Region]:
    """One region per layer group and plane: all layers and heads, and the tokens that are ever sent."""
    regions = []
    for group in spec.groups:
        start = max(0, total - group.window) if group.window else 0
        for plane in group.planes:
            regions.append(Region(group.id, plane.name, group.layers, tuple(range(plane.num_heads)), start, total))
    return regions
