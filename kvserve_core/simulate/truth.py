"""What profiles really cost in a simulated world: the library's figures with bias and drift. No policy sees this."""

from __future__ import annotations

from collections.abc import Sequence
from math import pi, sin

import numpy as np
from numpy.random import Generator

from kvserve_core.library import Profile
from kvserve_core.simulate.arrivals import lognormal
from kvserve_core.simulate.scenario import Speeds
from kvserve_core.simulate.trace import Floats


class Truth:
    """The true costs of ``profiles`` over time, of one seed."""

    __slots__ = ("_bias", "_drift", "_omega", "_phase", "costs", "index")

    def __init__(self, profiles: Sequence[Profile], speeds: Speeds, rng: Generator) -> None:
        count = len(profiles)
        self.index = {p.name: i for i, p in enumerate(profiles)}
        self._bias: list[list[float]] = lognormal(rng, speeds.bias, 2 * count).reshape(2, count).tolist()
        self._phase: list[list[float]] = rng.uniform(0, 2 * pi, (2, count)).tolist()
        self._drift = speeds.drift
        self._omega = 2 * pi / speeds.drift_period
        self.costs = [
            (p.encode.fixed_s, p.encode.s_per_byte, p.decode.fixed_s, p.decode.s_per_byte, 1.0 / p.cr) for p in profiles
        ]

    def factors(self, profile: int, time_s: float) -> tuple[float, float]:
        """How many times as long encoding and decoding take as the library says, without noise."""
        turn, drift = self._omega * time_s, self._drift
        encode = self._bias[0][profile] * (1.0 + drift * sin(turn + self._phase[0][profile]))
        decode = self._bias[1][profile] * (1.0 + drift * sin(turn + self._phase[1][profile]))
        return encode, decode

    def stages(self, profile: int, nbytes: Floats, times: Floats) -> tuple[Floats, Floats]:
        """Seconds of encoding and of decoding many requests, decided at ``times``, without noise."""
        encode_fixed, encode_each, decode_fixed, decode_each, _ = self.costs[profile]
        swing = [1.0 + self._drift * np.sin(self._omega * times + phase[profile]) for phase in self._phase]
        encode = (encode_fixed + encode_each * nbytes) * self._bias[0][profile] * swing[0]
        decode = (decode_fixed + decode_each * nbytes) * self._bias[1][profile] * swing[1]
        return encode, decode
