"""What a profile costs here and now: the measured speeds, corrected by what transfers really took."""

from __future__ import annotations

from dataclasses import dataclass

from kvserve_core.latency import Line, Speed
from kvserve_core.library import Profile
from kvserve_core.policy import Outcome

ALPHA = 0.2
"""Weight of a new observation once there are a few; the first ones count more, the library as one of them."""
MIN_RATIO_BYTES = 1 << 20
"""Below this the frame's header decides the ratio, not the profile."""
DRIFT = 0.05
"""Relative change of a cost above which tables made with the old one are dropped."""
_WILD = 1e3

Terms = tuple[str, float, float, float, float, float, float]
"""name, cr, wire bytes per original byte, encode fixed and per byte, decode fixed and per byte."""


@dataclass(slots=True)
class Running:
    """An EWMA that starts as a plain mean, with its first value as one sample."""

    value: float
    samples: int = 1

    def fold(self, sample: float) -> None:
        """Take one sample in."""
        self.samples += 1
        self.value += max(ALPHA, 1.0 / self.samples) * (sample - self.value)


class StagePrice:
    """A speed with its learned factor. A stage said to be free takes the first observation as its speed."""

    __slots__ = ("_base", "_factor")

    def __init__(self, base: Speed) -> None:
        self._base = base
        self._factor = Running(1.0)

    @property
    def speed(self) -> Speed:
        """Corrected."""
        return self._base.scaled(self._factor.value)

    def observe(self, nbytes: int, seconds: float) -> None:
        """``seconds`` for ``nbytes`` original bytes; 0 means not measured."""
        if nbytes <= 0 or seconds <= 0:
            return
        expected = self._base.seconds(nbytes)
        if expected <= 0:
            self._base = Speed(0.0, seconds / nbytes)
        else:
            self._factor.fold(min(max(seconds / expected, 1 / _WILD), _WILD))


class Priced:
    """A profile with live costs. ``terms`` is replaced whole, so that a reader never sees half an update."""

    __slots__ = ("_decode", "_encode", "_tabled", "_wire", "profile", "terms")

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._encode = StagePrice(profile.encode)
        self._decode = StagePrice(profile.decode)
        self._wire = Running(1.0 / profile.cr)
        self.terms: Terms = self._terms()
        self._tabled = self.terms

    def _terms(self) -> Terms:
        encode, decode, wire = self._encode.speed, self._decode.speed, self._wire.value
        costs = (encode.fixed_s, encode.s_per_byte, decode.fixed_s, decode.s_per_byte)
        return (self.profile.name, 1.0 / wire, wire, *costs)

    def line(self, nbytes: float) -> Line:
        """Eq. 1 at the live costs, without T_model."""
        _, _, wire, encode_fixed, encode_each, decode_fixed, decode_each = self.terms
        return Line(encode_fixed + decode_fixed + (encode_each + decode_each) * nbytes, wire * nbytes)

    def observe(self, outcome: Outcome) -> bool:
        """Learn from a transfer; whether the costs have moved so far that tables should be made anew."""
        self._encode.observe(outcome.raw_bytes, outcome.encode_s)
        self._decode.observe(outcome.raw_bytes, outcome.decode_s)
        if outcome.raw_bytes >= MIN_RATIO_BYTES and outcome.wire_bytes > 0:
            self._wire.fold(outcome.wire_bytes / outcome.raw_bytes)
        self.terms = self._terms()
        if not _drifted(self._tabled, self.terms):
            return False
        self._tabled = self.terms
        return True


def _drifted(old: Terms, new: Terms) -> bool:
    return any(abs(b - a) > DRIFT * a for a, b in zip(old[1:], new[1:], strict=True))
