"""Every error kvserve raises. A message says what happened, what was expected, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KVServeError(Exception):
    """Base class of all kvserve errors."""


class ConfigError(KVServeError):
    """A setting, spec or profile is wrong. ``path`` names the field, e.g. ``profiles.fast.planes.k.codec``."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.reason = message
        self.path = path

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, str]]:
        return type(self), (self.reason, self.path)

    def under(self, prefix: str) -> ConfigError:
        """The same error seen from one level further out."""
        return type(self)(self.reason, ".".join(p for p in (prefix, self.path) if p))


class UnknownNameError(ConfigError):
    """A name that nothing installed answers to."""


class UnavailableComponentError(ConfigError):
    """A component that is installed but cannot be used here (library or device missing)."""


class UnsupportedSpecError(ConfigError):
    """A stage cannot work on this plane, dtype, shape or shard."""


class ArtefactError(ConfigError):
    """A calibrated file is missing, unreadable or not what its hash says."""


class PluginError(KVServeError):
    """A plugin package could not be loaded; it is listed with this reason and the others go on."""


class FrameError(KVServeError):
    """Bytes from a peer or a file are not a valid frame. ``region`` names the place where known."""

    def __init__(self, message: str, region: object = None) -> None:
        super().__init__(f"{message} (in {region})" if region is not None else message)
        self.reason = message
        self.region = region

    def __reduce__(self) -> tuple[type[FrameError], tuple[str, object]]:
        return type(self), (self.reason, self.region)


class IntegrityError(FrameError):
    """A digest does not match: the bytes changed between the producer and here."""


class EscapeSegment(KVServeError):
    """A stage cannot carry these values well; the pipeline sends the segment raw, and only that one."""


class NonFiniteError(EscapeSegment):
    """NaN or Inf, or a value outside its range, reached a place where it cannot be represented."""


class DriftError(EscapeSegment):
    """Values are unlike those that a calibrated stage was made for."""


class Unacceptable(KVServeError):
    """The consumer cannot decode these ``stages``; it should recompute or ask for another profile."""

    def __init__(self, stages: Iterable[str], detail: str = "") -> None:
        self.stages = tuple(stages)
        self.detail = detail
        advice = "load the same weights" if self.other_model else "install the same components and libraries"
        super().__init__(
            f"the consumer cannot read {', '.join(map(repr, self.stages))}{': ' + detail if detail else ''};"
            f" {advice} on both sides"
        )

    @property
    def other_model(self) -> bool:
        """Whether the two sides serve different models, so that no profile at all would do."""
        return all(stage.startswith("model:") for stage in self.stages)

    def __reduce__(self) -> tuple[type[Unacceptable], tuple[tuple[str, ...], str]]:
        return type(self), (self.stages, self.detail)


class TransportError(KVServeError):
    """Moving bytes failed."""


class TransferTimeout(TransportError):
    """A deadline passed while waiting for a peer."""


class PeerLost(TransportError):
    """The peer closed the connection, died or aborted the transfer."""


class TransferCancelled(TransportError):
    """This side gave the transfer up."""


class LeaseLost(TransportError):
    """The producer no longer holds this transfer: its lease ran out or it was released."""


class StoreFull(TransportError):
    """A store or the published-bytes budget has no room for this object."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that ``name`` is most likely a misspelling of, or None."""
    by_lower = {k.lower(): k for k in sorted(known)}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    return by_lower[close[0]] if close else None


def did_you_mean(name: str, known: Iterable[str], what: str = "name") -> str:
    """``unknown codec 'zst'; did you mean 'zstd'?`` plus the allowed names."""
    names = sorted(known)
    close = nearest(name, names)
    hint = f"did you mean {close!r}? " if close else ""
    allowed = ", ".join(names) or "none are installed"
    return f"unknown {what} {name!r}; {hint}allowed: {allowed}"
