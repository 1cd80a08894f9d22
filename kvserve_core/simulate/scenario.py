"""What a simulated world is made of: links, tenants and how far true speeds stray from the library. Read from TOML."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvserve_core.bandwidth import MAX_BYTES, MAX_SECONDS
from kvserve_core.component import config_error
from kvserve_core.errors import ConfigError
from kvserve_core.feasible import MAX_FIGURE, MIN_RATE
from kvserve_core.units import Bandwidth, Duration, Size

Weight = Annotated[float, Field(ge=1e-9, le=1e9)]
Rate = Annotated[float, Field(ge=1e-6, le=1e9)]
"""Requests a second."""
Sigma = Annotated[float, Field(ge=0, le=5)]
"""Of a log-normal factor."""
Span = Annotated[Duration, Field(le=MAX_SECONDS)]
LinkRate = Annotated[Bandwidth, Field(ge=MIN_RATE, le=MAX_FIGURE)]
MAX_TOKENS = 2**30
"""Of one request. What that makes of bytes and of seconds is checked when requests are drawn."""
MAX_REQUESTS = 100_000_000
"""In memory at once."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Link(_Model):
    """A link that transfers share. ``bandwidth`` is constant; ``trace`` is a CSV (see ``trace.read_traces``).

    shared: active transfers get equal parts of it; false: each has the whole, as in a trace of what one flow got.
    overhead: seconds that every transfer takes besides its bytes.
    """

    name: str = Field("default", min_length=1)
    bandwidth: LinkRate = 1.25e9
    trace: Path | None = None
    shared: bool = True
    overhead: Span = 0.0005


class Tokens(_Model):
    """Prompt lengths: log-normal around a median, clipped. ``sigma`` 0 makes all of them the median."""

    median: float = Field(4096, gt=0, le=MAX_TOKENS)
    sigma: Sigma = 0.8
    low: int = Field(16, ge=1, le=MAX_TOKENS)
    high: int = Field(131072, ge=1, le=MAX_TOKENS)


class Tenant(_Model):
    """One kind of traffic. ``share`` of all requests, by weight; ``slo`` bounds TTFT or JCT (``slo_kind``)."""

    name: str = Field("default", min_length=1)
    share: Weight = 1.0
    link: str = "default"
    workload: str = Field("default", min_length=1)
    slo: Span | None = None
    slo_kind: Literal["ttft", "jct"] = "ttft"
    min_quality: float | None = Field(None, ge=0, le=1)
    tokens: Tokens = Tokens()
    output_tokens: int = Field(128, ge=1, le=MAX_TOKENS)


class Speeds(_Model):
    """How true costs differ from the library's, per profile and separately for encoding and decoding.

    A cost is multiplied by ``bias`` (log-normal, drawn once a seed), by ``1 + drift sin(2 pi t / drift_period +
    phase)``, and by ``noise`` (log-normal, drawn for every request). ``ratio_noise`` does the same to the bytes sent.
    """

    bias: Sigma = 0.0
    drift: float = Field(0.3, ge=0, lt=1)
    drift_period: Span = Field(120.0, ge=1e-3)
    noise: Sigma = 0.1
    ratio_noise: Sigma = 0.02


class Engine(_Model):
    """The engines around the transfer. Prefill is first come, first served on ``prefill_workers``; 0 never queues."""

    bytes_per_token: Size = Field(57344, gt=0, le=MAX_BYTES)
    prefill_fixed: Span = 0.01
    prefill_per_token: Span = 5e-5
    prefill_noise: Sigma = 0.05
    prefill_workers: int = Field(8, ge=0, le=2**20)
    decode_per_token: Span = 0.02


class Scenario(_Model):
    """A whole world. ``rate``: requests per second, Poisson; ``every``: evenly spaced instead.

    arrivals: a CSV instead of both (``time_s``, ``tokens``, and if wanted ``output_tokens`` and ``tenant``).
    requests: how many, and of a CSV at most so many; None: 10,000, and all of a CSV.
    """

    requests: int | None = Field(None, ge=1, le=MAX_REQUESTS)
    rate: Rate = 8.0
    every: Span | None = Field(None, ge=1e-9)
    arrivals: Path | None = None
    min_quality: float = Field(0.99, ge=0, le=1)
    prior_bandwidth: LinkRate = 1.25e9
    links: tuple[Link, ...] = Field((Link(),), min_length=1)
    tenants: tuple[Tenant, ...] = Field((Tenant(),), min_length=1)
    speeds: Speeds = Speeds()
    engine: Engine = Engine()

    @model_validator(mode="after")
    def _names(self) -> Self:
        for what, names in (("link", [x.name for x in self.links]), ("tenant", [x.name for x in self.tenants])):
            if len(set(names)) < len(names):
                raise ValueError(f"{what} names must differ, got {names}")
        known = {link.name for link in self.links}
        for tenant in self.tenants:
            if tenant.link not in known:
                raise ValueError(f"tenant {tenant.name!r} uses link {tenant.link!r}, but the links are {sorted(known)}")
        return self


def parse_scenario(given: Any, path: str = "scenario") -> Scenario:
    """From plain data.

    Raises:
        ConfigError: with the path of the first bad field.
    """
    try:
        return Scenario.model_validate(given)
    except ValidationError as error:
        raise config_error(error, Scenario, given, "field").under(path) from None


def read_scenario(path: Path) -> dict[str, Any]:
    """The plain data of a TOML file, with the files that it names made relative to it.

    Raises:
        ConfigError: it cannot be read or is not TOML.
    """
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot be read as TOML: {error}", str(path)) from error
    links = given.get("links")
    tables = [x for x in links if isinstance(x, dict)] if isinstance(links, list) else []  # the rest is refused later
    for table, key in [(given, "arrivals"), *((x, "trace") for x in tables)]:
        if isinstance(table.get(key), str):
            table[key] = str(path.parent / table[key])
    return given
