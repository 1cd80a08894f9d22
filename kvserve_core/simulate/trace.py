"""Bandwidth over time as steps, and its integral: the bytes a link could have carried, exact in both directions.

With ``K(t) = integral of B`` a transfer of w bytes that has the link to itself ends at ``K^-1(K(t) + w)``, however
often B changes on the way, so changes of bandwidth are no events of the simulation.
"""

from __future__ import annotations

import csv
import io
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvserve_core.errors import ConfigError
from kvserve_core.feasible import MAX_FIGURE, MIN_RATE
from kvserve_core.units import parse_bandwidth

Floats = NDArray[np.float64]
LONGEST_S = 1e9
"""Of a trace, and of the time in which requests arrive: 30 years."""
COLUMNS = {"bandwidth": 0.0, "bandwidth_gbps": 1e9 / 8, "bandwidth_mbps": 1e6 / 8}
"""Columns that a trace may hold, and bytes/s in one of their units; the first takes text such as ``25Gbps``."""


class Trace:
    """``rates[i]`` bytes/s from ``times[i]`` on. The last step lasts as long as the one before; then it repeats.

    Raises:
        ConfigError: times that do not rise from 0, a negative rate, or no rate above 0.
    """

    __slots__ = ("_carried", "_period_bytes", "_rates", "_starts", "period_s")

    def __init__(self, times: Sequence[float], rates: Sequence[float]) -> None:
        _check(times, rates)
        last = times[-1] - times[-2] if len(times) > 1 else 1.0
        self.period_s = times[-1] + last
        self._starts = [*map(float, times), self.period_s]
        self._rates = [*map(float, rates)]
        spans = (b - a for a, b in pairwise(self._starts))
        self._carried = [0.0]
        for span, rate in zip(spans, self._rates, strict=True):
            self._carried.append(self._carried[-1] + span * rate)
        self._period_bytes = self._carried[-1]

    def rate(self, time_s: float) -> float:
        """Bytes/s at a time."""
        return self._rates[bisect_right(self._starts, time_s % self.period_s) - 1]

    def carried(self, time_s: float) -> float:
        """Bytes between time 0 and ``time_s``."""
        rounds, rest = divmod(time_s, self.period_s)
        i = bisect_right(self._starts, rest) - 1
        return rounds * self._period_bytes + self._carried[i] + (rest - self._starts[i]) * self._rates[i]

    def when(self, nbytes: float) -> float:
        """The first time by which ``nbytes`` were carried: the inverse of :meth:`carried`."""
        rounds, rest = divmod(nbytes, self._period_bytes)
        if rest <= 0.0:  # the end of the round before, not the start of this one: they differ where the rate is 0
            rounds, rest = (rounds - 1.0, self._period_bytes) if rounds > 0.0 else (0.0, 0.0)
        i = max(0, bisect_left(self._carried, rest) - 1)
        rate = self._rates[i]
        inside = (rest - self._carried[i]) / rate if rate else 0.0
        return rounds * self.period_s + self._starts[i] + inside

    def carried_all(self, times: Floats) -> Floats:
        """:meth:`carried` of many times."""
        rounds, rest = np.divmod(times, self.period_s)
        return np.asarray(rounds * self._period_bytes + np.interp(rest, self._starts, self._carried))

    def when_all(self, nbytes: Floats) -> Floats:
        """:meth:`when` of many amounts. Steps of rate 0 are passed over, to within rounding."""
        rounds, rest = np.divmod(nbytes, self._period_bytes)
        return np.asarray(rounds * self.period_s + np.interp(rest, self._carried, self._starts))


def constant(rate: float) -> Trace:
    """The same ``rate`` (bytes/s) at all times."""
    return Trace((0.0,), (rate,))


def _check(times: Sequence[float], rates: Sequence[float]) -> None:
    if not times or len(times) != len(rates):
        raise ConfigError(f"a trace needs as many times as rates, and at least one; got {len(times)} and {len(rates)}")
    if times[0] != 0 or not all(a < b <= LONGEST_S for a, b in pairwise(times)):
        raise ConfigError(f"the times of a trace must begin at 0 and rise, to at most {LONGEST_S:.0f} s")
    if not all(rate == 0 or MIN_RATE <= rate <= MAX_FIGURE for rate in rates) or not any(rates):
        raise ConfigError(
            f"the bandwidths of a trace must be 0 or from {MIN_RATE:g} to {MAX_FIGURE:g} bytes/s, not all 0"
        )


def read_text(path: Path) -> str:
    """The text of a CSV, without the mark that spreadsheets put before it.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {error}", str(path)) from error


def read_file(path: Path) -> dict[str, Trace]:
    """:func:`read_traces` of a file."""
    return read_traces(read_text(path), str(path))


def read_traces(text: str, path: str = "trace") -> dict[str, Trace]:
    """Traces by link from a CSV: ``time_s``, one of :data:`COLUMNS`, and ``link`` where there are several.

    Other columns are ignored; without ``link`` the only trace is called ``default``.

    Raises:
        ConfigError: a column is missing or a cell is not a number; it names the row.
    """
    reader = csv.DictReader(io.StringIO(text))
    try:
        return _traces(reader, path)
    except csv.Error as error:  # a cell without end, among others
        raise ConfigError(f"cannot be read: {error}", path) from error


def _traces(reader: csv.DictReader[str], path: str) -> dict[str, Trace]:
    column = next((c for c in COLUMNS if c in (reader.fieldnames or ())), None)
    if column is None or "time_s" not in (reader.fieldnames or ()):
        wanted = ", ".join(COLUMNS)
        raise ConfigError(f"needs the columns 'time_s' and one of {wanted}; it has {reader.fieldnames!s:.200}", path)
    found: dict[str, tuple[list[float], list[float]]] = {}
    for number, row in enumerate(reader, 2):
        times, rates = found.setdefault(row.get("link") or "default", ([], []))
        try:
            times.append(float(row["time_s"]))
            rates.append(_rate(row[column], COLUMNS[column]))
        except (ValueError, TypeError, ConfigError) as error:
            raise ConfigError(f"line {number}: {error!s:.200}", path) from None
    if not found:
        raise ConfigError("has no rows", path)
    try:
        return {link: Trace(*columns) for link, columns in found.items()}
    except ConfigError as error:
        raise error.under(path) from None


def _rate(cell: str, unit: float) -> float:
    if unit:
        return float(cell) * unit
    try:
        return parse_bandwidth(float(cell))
    except ValueError:
        return parse_bandwidth(cell)
