"""What a bandit remembers: an arm is a profile in one place, a place a quality bucket and an interval of bandwidth."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from math import exp, log
from typing import Any

from kvserve_core.goodput import MIN_SPREAD

UNKNOWN = 0.25
"""Relative deviation that is assumed of an estimate nobody has tried."""
HALF_LIFE_OUTCOMES = 3.0
"""Outcomes of other profiles after which a residual counts half, for each time that it was seen itself."""
HALF_LIFE_S = 60.0
"""Seconds after which it does."""
_BY_OTHERS, _BY_TIME = log(2.0) / HALF_LIFE_OUTCOMES, log(2.0) / HALF_LIFE_S
REFRESH_S = 5.0
"""How often fading with time is brought up to date where nothing else happens."""
UNLIKE = 0.5
"""Relative error from which an outcome is unlike those before: what it teaches is then as doubtful as a first one."""
FORGOTTEN = 1e-3
"""Share of a residual that is none."""
MOST, LONGEST_S = 2.0**53, 366 * 86400.0
"""Counts and seconds beyond these are in no state that was saved."""
LEAST = -0.5
"""No residual takes away more than this share of an estimate."""
Line = tuple[float, float]
NOTHING: Line = (0.0, 0.0)
"""The line of an arm whose outcomes were all as expected."""
Current = tuple[int, float, float, float]
"""As of which outcome of the place, and until when, a line had faded to which: fixed and per byte."""
STALE: Current = (-1, 0.0, 0.0, 0.0)


def faded(age_s: float) -> float:
    """How much of what was learned so long ago still counts, from 0 to 1."""
    return exp(-age_s * _BY_TIME) if age_s > 0.0 else 1.0


@dataclass(slots=True)
class Arm:
    """The residual of one profile: decayed sums over its outcomes, the first of which is the library's word for 0.

    count, nbytes, seconds, squares, products: of outcomes, V, the residual, V^2 and their product. seen: outcomes of
    late. deviation: relative, of what came from what was expected. at, time_s: the last outcome, by the place's count
    and by the clock. line: the residual over V, fixed and per byte; current: what it had faded to. Both are replaced as
    a whole, for readers without a lock. recent: one bit for each late use, the last first. until_s: it cools down until
    then.
    """

    count: float = 0.0
    nbytes: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0
    seen: float = 0.0
    deviation: float = UNKNOWN
    at: int = 0
    time_s: float = 0.0
    line: Line = NOTHING
    current: Current = STALE
    recent: int = 0
    until_s: float = float("-inf")

    @property
    def fixed_s(self) -> float:
        """Seconds of the residual whatever V is."""
        return self.line[0]

    @property
    def s_per_byte(self) -> float:
        """Seconds of it for each byte."""
        return self.line[1]

    def kept(self, at: int, now: float) -> float:
        """How much of what was learned still counts, from 0 to 1."""
        if not self.seen:
            return 0.0
        age_s = now - self.time_s
        return exp((self.at - at) * _BY_OTHERS / self.seen - (age_s * _BY_TIME if age_s > 0.0 else 0.0))

    def residual(self, nbytes: float, kept: float) -> float:
        """Seconds to add to an estimate for V."""
        fixed_s, s_per_byte = self.line
        return (fixed_s + s_per_byte * nbytes) * kept

    def corrected(self, latency_s: float, model_s: float, nbytes: float, at: int, now: float) -> float:
        """An estimate with the residual, of which ``model_s`` is no part."""
        of, until_s, fixed_s, s_per_byte = self.current
        if of != at or now >= until_s:
            kept = self.kept(at, now)
            fixed_s, s_per_byte = self.line
            fixed_s, s_per_byte = fixed_s * kept, s_per_byte * kept
            self.current = (at, now + REFRESH_S, fixed_s, s_per_byte)
        more_s, least_s = fixed_s + s_per_byte * nbytes, LEAST * (latency_s - model_s)
        return latency_s + (more_s if more_s > least_s else least_s)

    def spread(self, kept: float) -> float:
        """Relative deviation to reckon with."""
        return UNKNOWN + (self.deviation - UNKNOWN) * kept

    def learn(
        self,
        nbytes: float,
        unexplained_s: float,
        expected_s: float,
        alpha: float,
        at: int,
        now: float,
        missed_s: float | None = None,
    ) -> None:
        """One more outcome: what it took beyond ``expected_s``, the estimate without a residual.

        missed_s: beyond what was estimated when it was chosen, where that is not the same.
        """
        kept = self.kept(at, now)
        fixed_s, s_per_byte = self.line
        error = (unexplained_s if missed_s is None else missed_s) - (fixed_s + s_per_byte * nbytes) * kept
        error = abs(error) / (expected_s if expected_s > 1e-9 else 1e-9)
        known = UNKNOWN + (self.deviation - UNKNOWN) * kept
        share = (1.0 - alpha) * kept
        self.deviation = known + alpha * (error - known)
        self.seen = 1.0 if error > UNLIKE else self.seen * share + 1.0
        self.at, self.time_s = at, now
        count = share * self.count
        if count < FORGOTTEN:  # the prior, until outcomes outweigh it: one outcome as expected
            count, sizes, squares, all_s, products = 1.0, nbytes, nbytes * nbytes, 0.0, 0.0
        else:
            sizes, squares = self.nbytes * share, self.squares * share
            all_s, products = self.seconds * share, self.products * share
        self.count, self.nbytes, self.squares = count + 1.0, sizes + nbytes, squares + nbytes * nbytes
        self.seconds, self.products = all_s + unexplained_s, products + nbytes * unexplained_s
        self.line = NOTHING if self.seconds == 0.0 == self.products else self._line()
        self.current = STALE  # for a reader may just have worked it out from the line before

    def used(self, late: bool, window: int, limit: int) -> bool:
        """Note a use; whether ``limit`` of the last ``window`` were late. Then the count begins anew."""
        self.recent = (self.recent << 1 | late) & ((1 << window) - 1)
        if self.recent.bit_count() < limit:
            return False
        self.recent = 0
        return True

    def _line(self) -> Line:
        """Least squares through the sums; where sizes tell nothing apart, nearly all of a latency is per byte."""
        count, sizes, seconds, whole = self.count, self.nbytes, self.seconds, self.nbytes * self.nbytes
        spread = self.squares * count - whole
        if spread > MIN_SPREAD * whole:
            each_s = (self.products * count - sizes * seconds) / spread
            return (seconds - each_s * sizes) / count, each_s
        return (0.0, seconds / sizes) if sizes > 0 else self.line


@dataclass(slots=True)
class Place:
    """The arms of one bucket and interval. outcomes: seen here. decisions: made here. used_s: when it was last used.

    cooling_s: until when an arm cools down.
    """

    arms: dict[str, Arm] = field(default_factory=dict)
    outcomes: int = 0
    decisions: int = 0
    used_s: float = 0.0
    cooling_s: float = float("-inf")


Bucket = tuple[str, float | None, str]
"""Workload, quality floor, and the interval by the profile that eq. 1 calls fastest in it."""


class Memory:
    """Places by bucket, at most ``max_arms`` arms in all; what was not used for ``ttl_s`` goes, then the oldest.

    Reading takes no lock; whoever writes holds the policy's.
    """

    def __init__(self, max_arms: int, ttl_s: float) -> None:
        self.places: dict[Bucket, Place] = {}
        self._max_arms = max_arms
        self._ttl_s = ttl_s
        self._arms = 0

    def place(self, bucket: Bucket, now: float) -> Place:
        """The place, made if need be."""
        found = self.places.get(bucket)
        if found is None or now - found.used_s > self._ttl_s:
            self._arms -= len(found.arms) if found else 0
            found = self.places[bucket] = Place(used_s=now)
            self.trim(now)
        return found

    def arm(self, bucket: Bucket, profile: str, now: float) -> tuple[Place, Arm]:
        """The arm of a profile there, made if need be."""
        place = self.places.get(bucket)
        if place is None or now - place.used_s > self._ttl_s:
            place = self.place(bucket, now)
        place.used_s = now
        arm = place.arms.get(profile)
        if arm is None:
            arm = place.arms[profile] = Arm()
            self._arms += 1
            self.trim(now)
        return place, arm

    def trim(self, now: float) -> None:
        """Drop what is too old and, while there are too many arms or places, the place longest unused."""
        if len(self) <= self._max_arms and len(self.places) <= self._max_arms:
            return
        for bucket in [b for b, p in self.places.items() if now - p.used_s > self._ttl_s]:
            self._arms -= len(self.places.pop(bucket).arms)
        for oldest in sorted(self.places, key=lambda b: self.places[b].used_s)[:-1]:
            if len(self) <= self._max_arms and len(self.places) <= self._max_arms:
                return
            self._arms -= len(self.places.pop(oldest).arms)

    def dump(self, now: float) -> list[dict[str, Any]]:
        """As plain data, with ages for times: the clock means nothing to another process."""
        return [
            {
                "bucket": list(bucket),
                "outcomes": place.outcomes,
                "decisions": place.decisions,
                "age_s": now - place.used_s,
                "arms": {name: _dumped(arm, now) for name, arm in place.arms.items()},
            }
            for bucket, place in self.places.items()
        ]

    def restore(self, dumped: list[dict[str, Any]], now: float) -> None:
        """What ``dump`` gave; time between the two does not count.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: it is something else.
        """
        places: dict[Bucket, Place] = {}
        for each in dumped:
            workload, floor, interval = each["bucket"]
            outcomes, decisions = (_within(each[name], MOST) for name in ("outcomes", "decisions"))
            arms = {str(n): _arm(a, now, int(outcomes)) for n, a in each["arms"].items()}
            place = Place(arms, int(outcomes), int(decisions), now - _within(each["age_s"], LONGEST_S))
            place.cooling_s = max((a.until_s for a in arms.values()), default=now)
            places[str(workload), None if floor is None else _within(floor, 1.0), str(interval)] = place
        self.places = places
        self._arms = sum(len(p.arms) for p in places.values())
        self.trim(now)

    def __len__(self) -> int:
        return self._arms


def _within(value: Any, most: float) -> float:
    """A figure of a stored state, none of which is negative."""
    number = float(value)
    if not 0 <= number <= most:  # false for NaN too
        raise ValueError(f"{number} is not from 0 to {most}")
    return number


def _dumped(arm: Arm, now: float) -> dict[str, Any]:
    figures = asdict(arm)
    figures["fixed_s"], figures["s_per_byte"] = figures.pop("line")
    del figures["current"]
    return figures | {"time_s": now - arm.time_s, "until_s": max(0.0, arm.until_s - now)}


def _arm(given: dict[str, Any], now: float, outcomes: int) -> Arm:
    numbers = {name: float(value) for name, value in given.items()}
    if not all(abs(value) < 1e30 for value in numbers.values()):  # false for NaN too
        raise ValueError("a figure is out of range")
    for name in ("count", "nbytes", "squares", "seen", "deviation", "at", "recent"):
        _within(numbers.get(name, 0.0), MOST if name == "at" else 1e30)
    _within(numbers["until_s"], LONGEST_S)
    arm = Arm(line=(numbers.pop("fixed_s", 0.0), numbers.pop("s_per_byte", 0.0)))
    for name, value in numbers.items():
        if name not in Arm.__slots__ or name in ("line", "current"):
            raise ValueError(f"{name!r} is no figure of an arm")
        setattr(arm, name, value)
    arm.at, arm.recent = int(numbers["at"]), int(numbers["recent"])
    if arm.at > outcomes:
        raise ValueError(f"an arm has outcome {arm.at} of {outcomes}")
    arm.time_s, arm.until_s = now - arm.time_s, now + arm.until_s
    return arm
