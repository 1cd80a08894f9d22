"""The servers behind the proxy: which are up, how busy each is, and which one is next."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import anyio
import httpx

log = logging.getLogger(__name__)
Role = Literal["prefill", "decode"]
BUSY = 429
STRIKES = 3
"""Failures in a row after which a server that still takes connections is left alone until its health check passes."""
FAILURES = (httpx.HTTPError, httpx.InvalidURL, OSError, OverflowError, UnicodeError, ExceptionGroup)
"""What asking a server may raise: it failed, whatever it was."""
NEVER_REACHED = (httpx.ConnectError, httpx.ConnectTimeout)
"""Errors after which the server has seen nothing of the request."""


class NoServer(Exception):
    """No server can take the request. status: what the client gets."""

    def __init__(self, message: str, status: int = 503) -> None:
        super().__init__(message)
        self.status = status


class Silent(httpx.NetworkError):
    """A server that has a request answers nothing any more, not even its health check."""


@dataclass(eq=False)
class Upstream:
    """One server. ``peer``: its PeerInfo as it described itself, None while unknown; ``asked``: it had its chance.

    silent: health checks in a row that were not answered in time, with nothing else heard from it meanwhile.
    refuses: it took no connection the last time.
    """

    role: Role
    url: str
    up: bool = True
    outstanding: int = 0
    failures: int = 0
    ejections: int = 0
    peer: Mapping[str, Any] | None = None
    asked: bool = False
    silent: int = 0
    refuses: bool = False
    turn: int = field(default=0, repr=False)
    _leashes: set[anyio.CancelScope] = field(default_factory=set, repr=False)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Counts as outstanding inside."""
        self.outstanding += 1
        try:
            yield
        finally:
            self.outstanding -= 1

    @contextmanager
    def leashed(self) -> Iterator[None]:
        """What runs inside is given up when the server falls silent: it may hang, or its machine may be gone.

        Raises:
            Silent: it was.
        """
        with anyio.CancelScope() as leash:
            self._leashes.add(leash)
            try:
                yield
            finally:
                self._leashes.discard(leash)
        if leash.cancelled_caught:
            raise Silent("it does not answer its health checks any more")

    def checked(self, error: Exception | None) -> None:
        """How a health check went. One that refuses connections may still finish what it has."""
        if error is None:
            self.succeeded()
            return
        silent = self.silent + 1 if isinstance(error, httpx.TimeoutException) else 0
        self.failed(error)
        self.silent = silent
        if self.silent >= STRIKES:
            for leash in tuple(self._leashes):
                leash.cancel()

    def failed(self, error: object) -> None:
        """A request or a health check failed; the server is ejected when nobody listens, or for the third time."""
        self.failures += 1
        self.refuses = isinstance(error, httpx.ConnectError)  # being late may be this proxy's own fault
        if self.up and (self.refuses or self.failures >= STRIKES):
            self.up, self.ejections = False, self.ejections + 1
            self.peer, self.asked = None, False  # what comes back may be another version
            log.warning("%s server %s is out until it is healthy again: %s", self.role, self.url, said(error))

    def heard(self) -> None:
        """Something came from it: it is busy perhaps, but does not hang."""
        self.silent = 0

    def succeeded(self) -> None:
        """It answered as it should."""
        if not self.up:
            log.warning("%s server %s is back", self.role, self.url)
        self.up, self.failures, self.silent, self.refuses = True, 0, 0, False


def said(error: object) -> str:
    """An error in words; those of a timeout have none of their own."""
    return str(error) or type(error).__name__


class Pool:
    """Servers of one role; the least busy one is next, and those that are equally busy take turns."""

    def __init__(self, role: Role, urls: Sequence[str]) -> None:
        self.role = role
        self.servers = tuple(Upstream(role, url.rstrip("/")) for url in urls)
        self._turns = 0

    def pick(self, but: Collection[Upstream] = ()) -> Upstream | None:
        """The next server that is up, or None.

        Where no decode server is, one that takes connections is tried all the same: it may only be slow, and nobody
        else can answer. Without prefill servers the decode servers can.
        """
        left = [s for s in self.servers if s not in but]
        free = [s for s in left if s.up]
        if not free and self.role == "decode" and not any(s.up for s in self.servers):
            free = [s for s in left if not s.refuses]
        if not free:
            return None
        chosen = min(free, key=lambda s: (s.outstanding, s.turn))
        self._turns += 1
        chosen.turn = self._turns
        return chosen
