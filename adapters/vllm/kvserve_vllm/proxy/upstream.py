"""The servers behind the proxy: which are up, how busy each is, and which one is next."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

log = logging.getLogger(__name__)
Role = Literal["prefill", "decode"]
STRIKES = 3
"""Failures in a row after which a server that still takes connections is left alone until its health check passes."""
NEVER_REACHED = (httpx.ConnectError, httpx.ConnectTimeout)
"""Errors after which the server has seen nothing of the request."""


@dataclass(eq=False)
class Upstream:
    """One server. ``peer``: its PeerInfo as it described itself, None while unknown; ``asked``: it had its chance."""

    role: Role
    url: str
    up: bool = True
    outstanding: int = 0
    failures: int = 0
    ejections: int = 0
    peer: Mapping[str, Any] | None = None
    asked: bool = False
    turn: int = field(default=0, repr=False)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Counts as outstanding inside."""
        self.outstanding += 1
        try:
            yield
        finally:
            self.outstanding -= 1

    def failed(self, error: object) -> None:
        """A request or a health check failed; the server is ejected when nobody listens, or for the third time."""
        self.failures += 1
        if self.up and (isinstance(error, NEVER_REACHED) or self.failures >= STRIKES):
            self.up, self.ejections = False, self.ejections + 1
            self.peer, self.asked = None, False  # what comes back may be another version
            log.warning("%s server %s is out until it is healthy again: %s", self.role, self.url, error or type(error))

    def succeeded(self) -> None:
        """It answered as it should."""
        if not self.up:
            log.warning("%s server %s is back", self.role, self.url)
        self.up, self.failures = True, 0


class Pool:
    """Servers of one role; the least busy one is next, and those that are equally busy take turns."""

    def __init__(self, role: Role, urls: Sequence[str]) -> None:
        self.role = role
        self.servers = tuple(Upstream(role, url.rstrip("/")) for url in urls)
        self._turns = 0

    def pick(self, but: Collection[Upstream] = ()) -> Upstream | None:
        """The next server that is up, or None."""
        free = [s for s in self.servers if s.up and s not in but]
        if not free:
            return None
        chosen = min(free, key=lambda s: (s.outstanding, s.turn))
        self._turns += 1
        chosen.turn = self._turns
        return chosen
