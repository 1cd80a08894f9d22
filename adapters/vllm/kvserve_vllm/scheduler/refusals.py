"""Profiles that a consumer whom nobody had named could not decode: unknown ones are not sent them again soon."""

from __future__ import annotations

import logging
import time

from kvserve_core.errors import Unacceptable
from kvserve_core.policy import RAW

log = logging.getLogger(__name__)
REMEMBERED_S = 600.0
"""Afterwards such a profile is tried once more: the consumer may have its library by now."""


def not_decodable(reason: str) -> bool:
    """Whether a transfer failed, by its consumer's words, for want of a component or a calibrated file.

    Not where the two sides serve different models: no profile would do there.
    """
    return f"{Unacceptable.__name__}: " in reason and "'model:" not in reason


class Refusals:
    """What ``peers.accept = "portable"`` learns: formats are known to decode anywhere, calibrated files are not."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}

    def add(self, profile: str, reason: str) -> None:
        """A consumer that nobody had named refused a profile. Raw is what is left in any case."""
        if profile == RAW:
            return
        if profile not in self._until_s:
            log.warning(
                "a consumer cannot decode profile %r, so consumers that are not named are not sent it for %g minutes;"
                " give both sides the same 'library', or name consumers to this server (kvserve vllm-proxy does). It"
                " said: %s",
                profile,
                REMEMBERED_S / 60,
                reason,
            )
        self._until_s[profile] = time.monotonic() + REMEMBERED_S

    def without(self, profiles: frozenset[str]) -> frozenset[str]:
        """Those that nobody refused lately."""
        if not self._until_s:
            return profiles
        now = time.monotonic()
        self._until_s = {name: until for name, until in self._until_s.items() if until > now}
        return profiles.difference(self._until_s)
