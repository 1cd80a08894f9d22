"""What pages are called in a store, and what is known of the quality of those that this server loaded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from blake3 import blake3

from kvserve_core.deployment import Deployment
from kvserve_core.prefix import KEY_CHARS, quality_class, stored_key

REMEMBERED = 2**20
"""Lossy pages whose quality is known one by one; beyond, all count as the worst that was seen."""


def page_name(space: str, key: str, quality: float) -> str:
    """The object of a page. key: SGLang's hash over all tokens up to the page's end. quality: its class."""
    return stored_key(blake3(f"{space}\n{key}".encode()).hexdigest()[:KEY_CHARS], quality)


def class_of(deployment: Deployment, name: str, held: float) -> float:
    """The class of pages stored under a profile, when what they were computed from is of quality ``held``.

    Whoever will read: the lowest quality that the profile has for any workload.
    """
    profile = next(p for p in deployment.controller.profiles if p.name == name)
    return quality_class(profile.worst_quality * held, exact=profile.exact and held == 1.0)


class Held:
    """Quality of the pages that this server has in memory, as far as they came out of the store with loss.

    What is computed after such pages carries their loss, so it must not be stored as if it were exact.
    """

    def __init__(self) -> None:
        self._lossy: dict[str, float] = {}
        self._worst = 1.0
        self._forgot = False

    def loaded(self, keys: Iterable[str], quality: float) -> None:
        """Pages came in; those that came in exactly stand for themselves again."""
        for key in keys:
            if quality == 1.0:
                self._lossy.pop(key, None)
            elif len(self._lossy) < REMEMBERED or key in self._lossy:
                self._lossy[key] = quality
            else:
                self._forgot = True
        self._worst = min(self._worst, quality)

    def of(self, prefix: Sequence[str] | None) -> float:
        """Of what is computed after these pages; of an unknown prefix the worst that it can be."""
        if prefix is None or self._forgot:
            return self._worst
        return min((self._lossy.get(key, 1.0) for key in prefix), default=1.0)
