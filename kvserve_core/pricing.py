"""What a profile costs here and now: the measured speeds, corrected by what transfers really took.

A correction is a factor, averaged as its logarithm: too slow by 10 and too fast by 10 weigh the same, and one absurd
figure is soon outweighed. Unless new observations keep it, it fades to 1, what the library says, with a half-life of
:data:`HALF_LIFE_S`: a profile that looked bad for a moment is not chosen, so nothing else would ever clear its name.
"""

from __future__ import annotations

from math import exp, inf, log
from numbers import Real
from typing import cast

from msgspec.structs import replace

from kvserve_core.bandwidth import MAX_BYTES, MAX_SECONDS
from kvserve_core.latency import Line, Speed
from kvserve_core.library import Profile
from kvserve_core.overlap import SEQUENTIAL, Form
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
_AS_LOW = 1.0 / SURPRISE
_FEW = 1.0 / ALPHA
"""Samples below which the mean of all of them weighs a new one more than ``ALPHA`` does."""
_FADING = log(2.0) / HALF_LIFE_S
_TAME, _WILD = 1e-3, 1e3
"""Corrections beyond these factors are not believed."""
_LARGEST_WIRE = 2.0
"""Wire bytes per original byte that are believed: what cannot be compressed goes raw, plus headers."""
_FREE = 1e-9
"""s/byte to which the factors of a stage said to be free apply."""

Terms = tuple[str, float, float, float, float, float, float]
"""name, cr, wire bytes per original byte, encode fixed and per byte, decode fixed and per byte."""


def plain(outcome: Outcome) -> bool:
    """Whether a report can be true at a glance, in one expression; one that is not plain may still be."""
    encode_s, transfer_s, decode_s, total_s = outcome.encode_s, outcome.transfer_s, outcome.decode_s, outcome.total_s
    raw_bytes, wire_bytes = outcome.raw_bytes, outcome.wire_bytes
    try:
        seconds, nbytes = encode_s + transfer_s + decode_s + total_s, raw_bytes + wire_bytes
        return (
            type(seconds) is float
            and seconds <= MAX_SECONDS
            and encode_s >= 0.0 <= transfer_s
            and decode_s >= 0.0 <= total_s
            and type(nbytes) is int
            and nbytes <= MAX_BYTES
            and raw_bytes >= 0 <= wire_bytes
            and type(outcome.profile) is str is type(outcome.link)
        )
    except (TypeError, OverflowError):
        return False


def refusal(outcome: Outcome) -> str | None:
    """The first figure of a report that cannot be true (negative, not finite, absurd or no number), or None."""
    for name, most in _LIMITS:
        value = getattr(outcome, name)
        if not isinstance(value, Real) or not 0 <= cast(float, value) <= most:
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


class Correction:
    """A factor: a mean of the first samples, then an EWMA, both of logarithms. ``rest`` is what it fades to.

    ``factor`` is as of the latest ``fold`` or ``fade``, and until the first of either as given. Not thread-safe.
    """

    __slots__ = ("_count", "_learned", "_off", "_rest", "_seen_s", "factor")

    def __init__(self, rest: float = 1.0, samples: int = 1, factor: float = 1.0) -> None:
        self._rest, self._count, self.factor = rest, samples, factor
        self._learned, self._seen_s = rest, inf
        self._off = 0
        """Which way the last sample was off."""

    def fade(self, now: float) -> float:
        """Bring ``factor`` up to date where nothing new was seen; what was never seen has nothing to fade."""
        if (seen_s := self._seen_s) != inf:
            kept = exp((seen_s - now) * _FADING) if now > seen_s else 1.0
            self.factor = float(self._rest * (self._learned / self._rest) ** kept)
        return self.factor

    def fold(self, sample: float, now: float) -> float:
        """Take a factor in. It replaces what has faded, so that seldom observations are not drawn to the library."""
        learned = self._learned
        self._count = count = self._count + 1
        weight = 1.0 / count if count < _FEW else ALPHA
        if (age := (now - self._seen_s) * _FADING) > weight:  # else less than that has faded, for 1 - exp(-age) < age
            weight = max(weight, 1.0 - exp(-age))
        change = (sample if _TAME <= sample <= _WILD else _TAME if sample < _TAME else _WILD) / learned
        if _AS_LOW <= change <= SURPRISE:
            self._off = 0
        else:
            before, self._off = self._off, 1 if change > 1.0 else -1
            if count > ESTABLISHED and weight <= 0.5:
                weight, change = (0.5, change) if self._off == before else (weight, SURPRISE**self._off)
        factor: float = learned * change**weight
        self._learned = self.factor = factor
        self._seen_s = now
        return factor


def _stage(base: Speed) -> tuple[float, float, Correction]:
    """Its fixed cost, that per byte, and their correction; one said to be free takes the first sample as its speed."""
    if base.seconds(1) <= 0:
        return 0.0, _FREE, Correction(1.0 / _WILD, 0, factor=0.0)
    return base.fixed_s, base.s_per_byte, Correction()


class Priced:
    """A profile with live costs. ``terms`` is replaced whole, so that a reader never sees half an update."""

    __slots__ = ("_cr", "_decode", "_encode", "_wire", "name", "profile", "terms")

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.name, self._cr = profile.name, profile.cr
        self._wire, self._encode, self._decode = Correction(), _stage(profile.encode), _stage(profile.decode)
        self.terms = self._terms()

    def _terms(self) -> Terms:
        (encode_fixed, encode_each, encode), (decode_fixed, decode_each, decode) = self._encode, self._decode
        cr, slower, later = self._cr / self._wire.factor, encode.factor, decode.factor
        encode_fixed, encode_each = encode_fixed * slower, encode_each * slower
        return (self.name, cr, 1.0 / cr, encode_fixed, encode_each, decode_fixed * later, decode_each * later)

    def costs(self, nbytes: float) -> tuple[float, float, float]:
        """Seconds of encoding, seconds of decoding, bytes on the wire."""
        _, _, wire, encode_fixed, encode_each, decode_fixed, decode_each = self.terms
        return encode_fixed + encode_each * nbytes, decode_fixed + decode_each * nbytes, wire * nbytes

    def follows(self, outcome: Outcome, nbytes: float) -> bool:
        """Whether the model follows a report by itself: it says what every stage took, and none is a surprise.

        What its stages took is then no news to anybody; the link's is the link's, whoever sends over it.
        """
        _, _, _, encode_fixed, encode_each, decode_fixed, decode_each = self.terms
        encode_s, decode_s = outcome.encode_s, outcome.decode_s
        if decode_s <= 0.0 or outcome.transfer_s <= 0.0:
            return False
        expected_s = decode_fixed + decode_each * nbytes
        if encode_s:
            expected_s += encode_fixed + encode_each * nbytes
        return _AS_LOW * expected_s <= encode_s + decode_s <= SURPRISE * expected_s

    def judged(self, outcome: Outcome, nbytes: float, bandwidth: float | None, form: Form) -> Outcome:
        """With what the transfer took and what was to be expected, for the policy: see :class:`Outcome`.

        bandwidth: None where the model follows what the stages took.
        """
        encode_s, transfer_s, decode_s = outcome.encode_s, outcome.transfer_s, outcome.decode_s
        spent_s = outcome.total_s
        if form.chunk_bytes or form.stored:
            told_s = form.seconds(encode_s, transfer_s, decode_s, outcome.raw_bytes)
        else:
            told_s, spent_s = encode_s + (transfer_s + decode_s), encode_s + spent_s
        if spent_s < told_s and not (form.chunk_bytes and spent_s):
            spent_s = told_s
        expected_s = told_s if bandwidth is None else self._expected(outcome, nbytes, bandwidth, form)
        return replace(outcome, spent_s=spent_s, expected_s=expected_s)

    def _expected(self, outcome: Outcome, nbytes: float, bandwidth: float, form: Form) -> float:
        """What the stages that ``outcome`` reports should have taken; all of them where it only holds a total."""
        encode_s, decode_s, wire = self.costs(nbytes)
        if outcome.encode_s or outcome.transfer_s or outcome.decode_s:
            encode_s = encode_s if outcome.encode_s else 0.0
            decode_s = decode_s if outcome.decode_s or outcome.total_s else 0.0
        return form.seconds(encode_s, wire / bandwidth, decode_s, nbytes)

    def line(self, nbytes: float, form: Form = SEQUENTIAL) -> Line:
        """Eq. 1 at the live costs, without T_model, of stages one after another."""
        encode_s, decode_s, wire = self.costs(nbytes)
        return Line(decode_s if form.stored else encode_s + decode_s, wire)

    def observe(self, outcome: Outcome, nbytes: float, now: float) -> None:
        """Learn from a transfer.

        nbytes: V of the decision, all of which is encoded, while ``outcome.raw_bytes`` is what the consumer asked for.
        When that is less (it held a prefix), whole segments came nevertheless: the ratio of the two says nothing of
        the profile, and what was decoded is told by the bytes on the wire.
        """
        raw_bytes, wire_bytes, wire = outcome.raw_bytes, outcome.wire_bytes, self._wire
        encode_s, decode_s = outcome.encode_s, outcome.decode_s
        decoded: float = raw_bytes
        if raw_bytes < WHOLE * nbytes:
            decoded, cr = max(raw_bytes, wire_bytes * self.terms[1]), self._cr / wire.fade(now)
        elif raw_bytes >= MIN_RATIO_BYTES and wire_bytes > 0:
            sent = wire_bytes / raw_bytes
            cr = self._cr / wire.fold((sent if sent < _LARGEST_WIRE else _LARGEST_WIRE) * self._cr, now)
        else:
            cr = self._cr / wire.fade(now)
        encode_fixed, encode_each, encode = self._encode
        decode_fixed, decode_each, decode = self._decode
        encoded = nbytes if nbytes > raw_bytes else raw_bytes
        measured = encode_s > 0 < encoded
        slower = encode.fold(encode_s / (encode_fixed + encode_each * encoded), now) if measured else encode.fade(now)
        measured = decode_s > 0 < decoded
        later = decode.fold(decode_s / (decode_fixed + decode_each * decoded), now) if measured else decode.fade(now)
        encode_fixed, encode_each = encode_fixed * slower, encode_each * slower  # as ``_terms``, without its call
        self.terms = (self.name, cr, 1.0 / cr, encode_fixed, encode_each, decode_fixed * later, decode_each * later)

    def refresh(self, now: float) -> None:
        """Costs as they have faded at ``now``."""
        for correction in (self._wire, self._encode[2], self._decode[2]):
            correction.fade(now)
        self.terms = self._terms()
