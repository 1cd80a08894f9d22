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
SURPRISE = 1.5
"""Once a correction is established, a sample counts as at most this many times off; two running count half at once."""
ESTABLISHED = 5
"""Samples from which it is."""
_SURPRISE = log(SURPRISE)
_FADING = log(2.0) / HALF_LIFE_S
_TAME, _WILD = 1e-3, 1e3
"""Corrections beyond these factors are not believed."""
_LARGEST_WIRE = 2.0
"""Wire bytes per original byte that are believed: what cannot be compressed goes raw, plus headers."""
_FREE = 1e-9
"""s/byte to which the factors of a stage said to be free apply."""

Terms = tuple[str, float, float, float, float, float, float]
"""name, cr, wire bytes per original byte, encode fixed and per byte, decode fixed and per byte."""


def refusal(outcome: Outcome) -> str | None:
    """The first figure of a report that cannot be true (negative, not finite, absurd or no number), or None."""
    return None if _usual(outcome) else _refusal(outcome)


def _usual(outcome: Outcome) -> bool:
    """The common case in one expression; what is not usual may still be right."""
    encode_s, transfer_s, decode_s, total_s = outcome.encode_s, outcome.transfer_s, outcome.decode_s, outcome.total_s
    raw_bytes, wire_bytes = outcome.raw_bytes, outcome.wire_bytes
    try:
        return (
            0 <= encode_s <= MAX_SECONDS >= transfer_s >= 0 <= decode_s <= MAX_SECONDS >= total_s >= 0
            and 0 <= raw_bytes <= MAX_BYTES >= wire_bytes >= 0
            and type(encode_s + transfer_s + decode_s + total_s) is float
            and type(raw_bytes + wire_bytes) is int
            and type(outcome.profile) is str is type(outcome.link)
        )
    except TypeError:
        return False


def _refusal(outcome: Outcome) -> str | None:
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


def _clamped(sample: float) -> float:
    return log(_WILD if sample > _WILD else _TAME)


class Correction:
    """The logarithm of a factor: a mean of the first samples, then an EWMA. ``rest`` is what it fades to.

    ``factor`` is as of the latest ``fold`` or ``fade``.
    """

    __slots__ = ("_learned", "_off", "_rest", "_samples", "_seen_s", "factor")

    def __init__(self, rest: float = 0.0, samples: int = 1) -> None:
        self._rest = self._learned = rest
        self._samples = samples
        self._seen_s: float | None = None
        self._off = 0
        self.factor = exp(rest)

    @property
    def seen(self) -> bool:
        """Whether there is anything to go by."""
        return self._samples > 0

    def fold(self, sample: float, now: float) -> None:
        """Take a factor in. It replaces what has faded, so that seldom observations are not drawn to the library."""
        self._samples += 1
        weight = max(ALPHA, 1.0 / self._samples, 1.0 - self._kept(now))
        change = (log(sample) if _TAME <= sample <= _WILD else _clamped(sample)) - self._learned
        off = (change > _SURPRISE) - (change < -_SURPRISE)
        if off and self._samples > ESTABLISHED and weight <= 0.5:
            weight, change = (0.5, change) if off == self._off else (weight, off * _SURPRISE)
        self._off = off
        self._learned += weight * change
        self._seen_s = now
        self.factor = exp(self._learned)

    def fade(self, now: float) -> None:
        """Bring ``factor`` up to date where nothing new was seen."""
        if self._seen_s is not None:
            self.factor = exp(self._rest + (self._learned - self._rest) * self._kept(now))

    def _kept(self, now: float) -> float:
        """Share of what was learned that still counts."""
        if self._seen_s is None or now <= self._seen_s:
            return 1.0
        return exp((self._seen_s - now) * _FADING)


class StagePrice:
    """A speed with its correction. A stage said to be free takes the first observation as its speed."""

    __slots__ = ("_correction", "_each_s", "_fixed_s")

    def __init__(self, base: Speed) -> None:
        free = base.seconds(1) <= 0
        self._fixed_s, self._each_s = (0.0, _FREE) if free else (base.fixed_s, base.s_per_byte)
        self._correction = Correction(-log(_WILD), 0) if free else Correction()

    def speed(self) -> tuple[float, float]:
        """Corrected: seconds whatever the size, and seconds per byte."""
        if not self._correction.seen:
            return 0.0, 0.0
        factor = self._correction.factor
        return self._fixed_s * factor, self._each_s * factor

    def observe(self, nbytes: float, seconds: float, now: float) -> None:
        """``seconds`` for ``nbytes`` original bytes; 0 means not measured."""
        if nbytes > 0 and seconds > 0:
            self._correction.fold(seconds / (self._fixed_s + self._each_s * nbytes), now)
        else:
            self._correction.fade(now)

    def fade(self, now: float) -> None:
        """See :meth:`Correction.fade`."""
        self._correction.fade(now)


class Priced:
    """A profile with live costs. ``terms`` is replaced whole, so that a reader never sees half an update."""

    __slots__ = ("_decode", "_encode", "_wire", "profile", "terms")

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._encode = StagePrice(profile.encode)
        self._decode = StagePrice(profile.decode)
        self._wire = Correction()
        self.terms = self._terms()

    def _terms(self) -> Terms:
        cr = self.profile.cr / self._wire.factor
        return (self.profile.name, cr, 1.0 / cr, *self._encode.speed(), *self._decode.speed())

    def costs(self, nbytes: float) -> tuple[float, float, float]:
        """Seconds of encoding, seconds of decoding, bytes on the wire."""
        _, _, wire, encode_fixed, encode_each, decode_fixed, decode_each = self.terms
        return encode_fixed + encode_each * nbytes, decode_fixed + decode_each * nbytes, wire * nbytes

    def expected(self, outcome: Outcome, nbytes: float, bandwidth: float, form: Form) -> float:
        """What the stages that ``outcome`` reports should have taken; all of them where it only holds a total."""
        _, _, wire, encode_fixed, encode_each, decode_fixed, decode_each = self.terms
        encode_s, decode_s = encode_fixed + encode_each * nbytes, decode_fixed + decode_each * nbytes
        if not (outcome.encode_s and outcome.decode_s) and (outcome.encode_s or outcome.transfer_s or outcome.decode_s):
            encode_s = encode_s if outcome.encode_s else 0.0
            decode_s = decode_s if outcome.decode_s or outcome.total_s else 0.0
        return form.seconds(encode_s, wire * nbytes / bandwidth, decode_s, nbytes)

    def line(self, nbytes: float) -> Line:
        """Eq. 1 at the live costs, without T_model."""
        encode_s, decode_s, wire = self.costs(nbytes)
        return Line(encode_s + decode_s, wire)

    def observe(self, outcome: Outcome, nbytes: float, now: float) -> None:
        """Learn from a transfer.

        nbytes: V of the decision, all of which is encoded, while ``outcome.raw_bytes`` is what the consumer asked for.
        When that is less (it held a prefix), whole segments came nevertheless: the ratio of the two says nothing of
        the profile, and what was decoded is told by the bytes on the wire.
        """
        raw_bytes, wire_bytes = outcome.raw_bytes, outcome.wire_bytes
        whole = raw_bytes >= WHOLE * nbytes
        if whole and raw_bytes >= MIN_RATIO_BYTES and wire_bytes > 0:
            self._wire.fold(min(wire_bytes / raw_bytes, _LARGEST_WIRE) * self.profile.cr, now)
        else:
            self._wire.fade(now)
        decoded = raw_bytes if whole else max(raw_bytes, wire_bytes * self.terms[1])
        self._encode.observe(max(nbytes, raw_bytes), outcome.encode_s, now)
        self._decode.observe(decoded, outcome.decode_s, now)
        self.terms = self._terms()

    def refresh(self, now: float) -> None:
        """Costs as they have faded at ``now``."""
        for each in (self._encode, self._decode, self._wire):
            each.fade(now)
        self.terms = self._terms()
