"""What an evaluator is given: an engine that holds KV by transfer id, texts, and the roundtrip under test."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kvserve_core.spec import KVSpec, Region

Progress = Callable[[int, int], None]
"""``progress(done, of)``."""


def quiet(done: int, of: int) -> None:
    """The :data:`Progress` that says nothing."""
    del done, of


class Engine(Protocol):
    """One model, batch size 1. Of a prompt of N tokens the KV of tokens 0 .. N-2 is transferred, as in serving."""

    spec: KVSpec

    def tokenize(self, text: str, chat: bool = False) -> list[int]:
        """Token ids of a text, or of a user message in the model's chat template."""
        ...

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        ...

    def prefill(self, transfer_id: str, ids: Sequence[int]) -> object:
        """Compute and hold the KV of ``ids``."""
        ...

    def open(self, transfer_id: str, num_tokens: int) -> object:
        """Room for KV that is injected with ``scatter``."""
        ...

    def gather(self, transfer_id: str, at: Region) -> Tensor:
        """A copy of a region of held KV, ``[L, H, T, D]``."""
        ...

    def scatter(self, transfer_id: str, at: Region, x: Tensor) -> None:
        """Inject a region."""
        ...

    def release(self, transfer_id: str) -> None:
        """Forget held KV; safe to call twice."""
        ...

    def teacher_forced(self, transfer_id: str, ids: Sequence[int]) -> Tensor:
        """Logits ``[len(ids), V]`` when ``ids`` follow the held KV; the held KV stays as it is."""
        ...

    def stream(self, transfer_id: str, last: int, max_tokens: int) -> Iterator[int]:
        """Greedy tokens after the held KV and the ``last`` prompt token; the held KV stays as it is."""
        ...

    def generate(self, transfer_id: str, last: int, max_tokens: int) -> list[int]:
        """All of :meth:`stream`."""
        ...


class Roundtrip(Protocol):
    """Compress and restore the KV of one request: ``read`` gives any region, ``total`` is its number of tokens.

    Gives restored regions in the plane's dtype. Whatever it does not give counts as not sent, which is an error
    unless no later token attends to it.
    """

    def __call__(self, read: Callable[[Region], Tensor], total: int) -> Iterable[tuple[Region, Tensor]]:
        """Regions and their restored values."""
        ...


@dataclass(frozen=True)
class Text:
    """A text to evaluate on. kind: ``prose``, ``code``; samples are drawn evenly over kinds."""

    name: str
    kind: str
    text: str


@dataclass(frozen=True)
class TokenText:
    """A text as tokens: its first ones are the prompt, the rest the continuation."""

    name: str
    ids: tuple[int, ...]


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
