"""What a profile costs here and now: the measured speeds, corrected by what transfers really took.

A correction is a factor, averaged as its logarithm: too slow by 10 and too fast by 10 weigh the same, and one absurd
figure is soon outweighed. Unless new observations keep it, it fades to 1, what the library says, with a half-life of
:data:`HALF_LIFE_S`: a profile that looked bad for a moment is not chosen, so nothing else would ever clear its name.
"""

from __future__ import annotations

from math import exp, log

from kvserve_core.bandwidth import MAX_BYTES, MAX_SECONDS
from kvserve_core.latency import Line, Speed
from kvserve_core.library import Profile
from kvserve_core.overlap import Form
from kvserve_core.policy import Outcome

ALPHA = 0.2
"""Weight of a new observation once there are a few; the first ones count more, the library as one of them."""
HALF_LIFE_S = 60.0
"""Of a correction since the last observation, by the controller's clock."""
MIN_RATIO_BYTES = 1 << 20
"""Below this the frame's header decides the ratio, not the profile."""
WHOLE = 0.9
"""Share of V from which a fetch counts as one of everything."""
DRIFT = 0.05
"""Relative change of a cost above which tables made with the old one are dropped."""
SURPRISE = 1.5
"""Once a correction is established, a sample counts as at most this many times off; two running count half at once."""
ESTABLISHED = 5
"""Samples from which it is."""
_WILD = 1e3
"""Corrections beyond this factor are not believed."""
_LARGEST_WIRE = 2.0
"""Wire bytes per original byte that are believed: what cannot be compressed goes raw, plus headers."""
_FREE = 1e-9
"""s/byte to which the factors of a stage said to be free apply."""

Terms = tuple[str, float, float, float, float, float, float]
"""name, cr, wire bytes per original byte, encode fixed and per byte, decode fixed and per byte."""


def refusal(outcome: Outcome) -> str | None:
    """The first figure of a report that cannot be true (negative, not finite, absurd or no number), or None."""
    for name, most in _LIMITS:
        value = getattr(outcome, name)
        if not isinstance(value, (int, float)) or not 0 <= value <= most:
            return f"{name} is {shown(value)}, expected a number from 0 to {most}"
    for name in ("profile", "link"):
        if not isinstance(getattr(outcome, name), str):
            return f"{name} is {shown(getattr(outcome, name))}, expected a name"
    return None


def shown(value: object) -> str:
    """A figure for a message: short, and no error of its own (Python refuses to write out very large integers)."""
    try:
        return f"{value!r:.40}"
    except Exception:  # noqa: BLE001  # the object is not ours, and may do anything when asked for its text
        return f"{type(value).__name__} that cannot be shown"


_LIMITS = (
    *((name, MAX_SECONDS) for name in ("encode_s", "transfer_s", "decode_s", "total_s")),
    *((name, MAX_BYTES) for name in ("raw_bytes", "wire_bytes")),
)


def spent(outcome: Outcome, form: Form) -> float:
    """What a transfer took, T_model aside: encoding at the producer, and the consumer's total (or its parts)."""
    if form.chunk_bytes:
        return outcome.total_s or form.seconds(
            outcome.encode_s, outcome.transfer_s, outcome.decode_s, outcome.raw_bytes
        )
    return outcome.encode_s + max(outcome.total_s, outcome.transfer_s + outcome.decode_s)


class Correction:
    """The logarithm of a factor: a mean of the first samples, then an EWMA. ``rest`` is what it fades to."""

    __slots__ = ("_learned", "_off", "_rest", "_samples", "_seen_s")

    def __init__(self, rest: float = 0.0, samples: int = 1) -> None:
        self._rest = self._learned = rest
        self._samples = samples
        self._seen_s: float | None = None
        self._off = 0

    @property
    def seen(self) -> bool:
        """Whether there is anything to go by."""
        return self._samples > 0

    def factor(self, now: float) -> float:
        """As it has faded at ``now``."""
        return exp(self._rest + (self._learned - self._rest) * self._kept(now))

    def fold(self, sample: float, now: float) -> None:
        """Take a factor in. It replaces what has faded, so that seldom observations are not drawn to the library."""
        self._samples += 1
        weight = max(ALPHA, 1.0 / self._samples, 1.0 - self._kept(now))
        change = log(min(max(sample, 1 / _WILD), _WILD)) - self._learned
        off = (change > log(SURPRISE)) - (change < -log(SURPRISE))
        if off and self._samples > ESTABLISHED and weight <= 0.5:
            weight, change = (0.5, change) if off == self._off else (weight, off * log(SURPRISE))
        self._off = off
        self._learned += weight * change
        self._seen_s = now

    def _kept(self, now: float) -> float:
        if self._seen_s is None:
            return 1.0
        return float(0.5 ** (max(0.0, now - self._seen_s) / HALF_LIFE_S))


class StagePrice:
    """A speed with its correction. A stage said to be free takes the first observation as its speed."""

    __slots__ = ("_base", "_correction")

    def __init__(self, base: Speed) -> None:
        free = base.seconds(1) <= 0
        self._base = Speed(0.0, _FREE) if free else base
        self._correction = Correction(-log(_WILD), 0) if free else Correction()

    def speed(self, now: float) -> Speed:
        """Corrected."""
        return self._base.scaled(self._correction.factor(now)) if self._correction.seen else Speed()

    def observe(self, nbytes: float, seconds: float, now: float) -> None:
        """``seconds`` for ``nbytes`` original bytes; 0 means not measured."""
        if nbytes > 0 and seconds > 0:
            self._correction.fold(seconds / self._base.seconds(nbytes), now)


class Priced:
    """A profile with live costs. ``terms`` is replaced whole, so that a reader never sees half an update."""

    __slots__ = ("_decode", "_encode", "_tabled", "_wire", "profile", "terms")

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._encode = StagePrice(profile.encode)
        self._decode = StagePrice(profile.decode)
        self._wire = Correction()
        self.terms = self._tabled = self._terms(0.0)

    def _terms(self, now: float) -> Terms:
        encode, decode, wire = self._encode.speed(now), self._decode.speed(now), self._wire.factor(now)
        costs = (encode.fixed_s, encode.s_per_byte, decode.fixed_s, decode.s_per_byte)
        return (self.profile.name, self.profile.cr / wire, wire / self.profile.cr, *costs)

    def costs(self, nbytes: float) -> tuple[float, float, float]:
        """Seconds of encoding, seconds of decoding, bytes on the wire."""
        _, _, wire, encode_fixed, encode_each, decode_fixed, decode_each = self.terms
        return encode_fixed + encode_each * nbytes, decode_fixed + decode_each * nbytes, wire * nbytes

    def expected(self, outcome: Outcome, nbytes: float, bandwidth: float, form: Form) -> float:
        """What the stages that ``outcome`` reports should have taken; all of them where it only holds a total."""
        encode_s, decode_s, wire = self.costs(nbytes)
        split = outcome.encode_s > 0 or outcome.transfer_s > 0 or outcome.decode_s > 0
        if split and not outcome.encode_s:
            encode_s = 0.0
        if split and not (outcome.decode_s or outcome.total_s):
            decode_s = 0.0
        return form.seconds(encode_s, wire / bandwidth, decode_s, nbytes)

    def line(self, nbytes: float) -> Line:
        """Eq. 1 at the live costs, without T_model."""
        encode_s, decode_s, wire = self.costs(nbytes)
        return Line(encode_s + decode_s, wire)

    def observe(self, outcome: Outcome, nbytes: float, now: float) -> bool:
        """Learn from a transfer; whether the costs have moved so far that tables should be made anew.

        nbytes: V of the decision, all of which is encoded, while ``outcome.raw_bytes`` is what the consumer asked for.
        When that is less (it held a prefix), whole segments came nevertheless: the ratio of the two says nothing of
        the profile, and what was decoded is told by the bytes on the wire.
        """
        whole = outcome.raw_bytes >= WHOLE * nbytes
        if whole and outcome.raw_bytes >= MIN_RATIO_BYTES and outcome.wire_bytes > 0:
            wire = min(outcome.wire_bytes / outcome.raw_bytes, _LARGEST_WIRE)
            self._wire.fold(wire * self.profile.cr, now)
        decoded = outcome.raw_bytes if whole else max(outcome.raw_bytes, outcome.wire_bytes * self.terms[1])
        self._encode.observe(max(nbytes, outcome.raw_bytes), outcome.encode_s, now)
        self._decode.observe(decoded, outcome.decode_s, now)
        return self.refresh(now)

    def refresh(self, now: float) -> bool:
        """Costs as they have faded at ``now``; whether tables should be made anew."""
        self.terms = self._terms(now)
        if not _drifted(self._tabled, self.terms):
            return False
        self._tabled = self.terms
        return True


def _drifted(old: Terms, new: Terms) -> bool:
    return any(abs(b - a) > DRIFT * a for a, b in zip(old[1:], new[1:], strict=True))
