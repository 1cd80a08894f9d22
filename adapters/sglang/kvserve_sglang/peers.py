"""The decode ranks that a prefill rank knows, and whether it can serve them."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping

from kvserve_core.errors import TransportError
from kvserve_sglang.messages import Register

KEPT = 16384
"""Decode ranks that are remembered, those that introduced themselves last."""
log = logging.getLogger(__name__)


class Peers:
    """By session. Filled by the control thread, read by the scheduler's."""

    def __init__(self, fingerprint: str, holds: Mapping[str, str]) -> None:
        self._fingerprint, self._holds = fingerprint, holds
        self._known: OrderedDict[str, tuple[Register, str | None]] = OrderedDict()

    def add(self, register: Register) -> None:
        """A decode rank introduced itself."""
        refusal = self._refused(register)
        if refusal:
            log.error("decode rank %s is refused: %s", register.session, refusal)
        self._known[register.session] = (register, refusal)  # never absent on the way: the scheduler reads
        self._known.move_to_end(register.session)
        while len(self._known) > KEPT:
            self._known.popitem(last=False)

    def of(self, session: str) -> Register:
        """What a rank said of itself.

        Raises:
            TransportError: it never introduced itself.
        """
        if session not in self._known:
            raise TransportError(f"decode rank {session!r} asked for a request before it registered")
        return self._known[session][0]

    def refusal(self, session: str) -> str | None:
        """Why a rank cannot be served, None when it can."""
        if session not in self._known:
            return f"decode rank {session!r} asked for a request before it registered"
        return self._known[session][1]

    def _refused(self, register: Register) -> str | None:
        if register.peer.fingerprint == self._fingerprint:
            return None
        differing = [
            f"{name} is {mine!r} here and {register.holds.get(name)!r} there"
            for name, mine in self._holds.items()
            if register.holds.get(name) != mine
        ]
        what = "; ".join(differing) or "the caches of the two models are laid out differently"
        return f"the decode server holds another KV cache than this prefill server: {what}; start both alike"
