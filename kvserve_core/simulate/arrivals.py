"""All requests of one run, drawn before it starts: when they arrive, how long they are, when their prefill begins.

Nothing that a policy does changes these, so the queue for prefill is worked out here, in order of arrival, and every
policy meets the same requests and the same noise. Columns are ``array('d')``: 8 bytes a value and quick to index.
"""

from __future__ import annotations

import csv
import io
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from pathlib import Path

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from kvserve_core.bandwidth import MAX_BYTES, MAX_SECONDS
from kvserve_core.errors import ConfigError, did_you_mean
from kvserve_core.simulate.scenario import MAX_TOKENS, Engine, Scenario, Tokens
from kvserve_core.simulate.trace import LONGEST_S, Floats, read_text

Ints = NDArray[np.int64]
REQUESTS = 10_000
"""That are drawn where a scenario does not say how many."""


@dataclass(frozen=True, slots=True)
class Requests:
    """Columns of all requests in order of arrival. Seconds, original bytes, and factors around 1 for the noise."""

    tenant: array[int]
    nbytes: array[int]
    output_tokens: array[int]
    arrival: array[float]
    start: array[float]
    """When prefill begins, and the decision is made."""
    prefill_s: array[float]
    model_s: array[float]
    """The prefill time that the scheduler expects: ``prefill_s`` without its noise."""
    encode_noise: array[float]
    decode_noise: array[float]
    ratio_noise: array[float]

    def __len__(self) -> int:
        return len(self.arrival)


def draw(scenario: Scenario, rng: Generator) -> Requests:
    """The requests of one seed.

    Raises:
        ConfigError: the file of arrivals cannot be used.
    """
    arrival, tenant, tokens, output = _traffic(scenario, rng)
    count, engine, speeds = len(arrival), scenario.engine, scenario.speeds
    model_s = np.asarray(engine.prefill_fixed + engine.prefill_per_token * tokens, np.float64)
    _check(int(tokens.max()), float(model_s.max()), engine)
    prefill_s = model_s * lognormal(rng, engine.prefill_noise, count)
    return Requests(
        tenant=_whole(tenant),
        nbytes=_whole(tokens * engine.bytes_per_token),
        output_tokens=_whole(output),
        arrival=_column(arrival),
        start=_column(_starts(arrival, prefill_s, engine)),
        prefill_s=_column(prefill_s),
        model_s=_column(model_s),
        encode_noise=_column(lognormal(rng, speeds.noise, count)),
        decode_noise=_column(lognormal(rng, speeds.noise, count)),
        ratio_noise=_column(lognormal(rng, speeds.ratio_noise, count)),
    )


def _check(tokens: int, prefill_s: float, engine: Engine) -> None:
    """Of the longest request."""
    nbytes = tokens * engine.bytes_per_token
    if nbytes > MAX_BYTES or prefill_s > MAX_SECONDS:
        raise ConfigError(
            f"a request of {tokens} tokens has {nbytes} bytes and {prefill_s:.3g} s of prefill; at most {MAX_BYTES}"
            f" bytes and {MAX_SECONDS:.0f} s can be simulated",
            "scenario.engine",
        )


def lognormal(rng: Generator, sigma: float, count: int) -> Floats:
    """Factors with mean 1; always ``count`` draws, so that a sigma of 0 leaves what is drawn later as it is."""
    return np.asarray(np.exp(sigma * rng.standard_normal(count) - sigma * sigma / 2))


def _traffic(scenario: Scenario, rng: Generator) -> tuple[Floats, Ints, Ints, Ints]:
    if scenario.arrivals is not None:
        return _read(scenario.arrivals, scenario)
    count = scenario.requests or REQUESTS
    shares = np.array([t.share for t in scenario.tenants])
    tenant = rng.choice(len(shares), count, p=shares / shares.sum())
    gaps = np.full(count, scenario.every) if scenario.every else rng.exponential(1.0 / scenario.rate, count)
    tokens, output = np.empty(count, np.int64), np.empty(count, np.int64)
    for i, each in enumerate(scenario.tenants):
        mine = tenant == i
        tokens[mine] = _lengths(each.tokens, rng, int(mine.sum()))
        output[mine] = each.output_tokens
    return np.cumsum(gaps) - gaps[0], tenant, tokens, output


def _lengths(tokens: Tokens, rng: Generator, count: int) -> Ints:
    drawn = tokens.median * np.exp(tokens.sigma * rng.standard_normal(count))
    return np.clip(drawn, tokens.low, tokens.high).astype(np.int64)


def _starts(arrival: Floats, prefill_s: Floats, engine: Engine) -> Floats | Sequence[float]:
    """First come, first served: each takes the worker that is free first."""
    if not engine.prefill_workers:
        return arrival
    free = [0.0] * engine.prefill_workers
    heapify(free)
    starts = []
    for come, spent in zip(arrival.tolist(), prefill_s.tolist(), strict=True):
        start = max(come, free[0])
        heapreplace(free, start + spent)
        starts.append(start)
    return starts


def _read(path: Path, scenario: Scenario) -> tuple[Floats, Ints, Ints, Ints]:
    """A CSV of arrivals, sorted by time: all of them, or the first ``scenario.requests``."""
    names = {t.name: i for i, t in enumerate(scenario.tenants)}
    rows, text = [], read_text(path)
    try:
        for number, row in enumerate(csv.DictReader(io.StringIO(text)), 2):
            rows.append(_row(row, names, scenario, f"{path}, line {number}"))
    except csv.Error as error:
        raise ConfigError(f"cannot be read: {error}", str(path)) from error
    if not rows:
        raise ConfigError("has no rows", str(path))
    rows.sort(key=lambda row: row[0])
    times, tenant, tokens, output = zip(*rows[: scenario.requests], strict=True)
    return np.array(times), np.array(tenant), np.array(tokens), np.array(output)


def _row(row: dict[str, str], names: dict[str, int], scenario: Scenario, path: str) -> tuple[float, int, int, int]:
    name = row.get("tenant") or scenario.tenants[0].name
    if name not in names:
        raise ConfigError(did_you_mean(name, names, "tenant"), path)
    output = scenario.tenants[names[name]].output_tokens
    try:
        time_s, tokens = float(row["time_s"]), int(row["tokens"])
        output = int(row.get("output_tokens") or output)
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"needs numbers in 'time_s' and 'tokens': {error!s:.200}", path) from None
    if not (0 <= time_s <= LONGEST_S and 1 <= tokens <= MAX_TOKENS and 1 <= output <= MAX_TOKENS):
        raise ConfigError(
            f"time_s must be from 0 to {LONGEST_S:.0f}, both kinds of tokens from 1 to {MAX_TOKENS}", path
        )
    return time_s, names[name], tokens, output


def _column(values: Floats | Sequence[float]) -> array[float]:
    return array("d", np.asarray(values, np.float64).tobytes())


def _whole(values: Ints) -> array[int]:
    return array("q", np.asarray(values, np.int64).tobytes())
