"""What a request may ask of the service: workload, latency budget and quality floor, as text from a router."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvserve_core.component import config_error
from kvserve_core.errors import ConfigError
from kvserve_core.units import Duration

MAX_SLO_S = 86400.0
"""A day: more says nothing, and numbers without bound overflow in sums and powers of them."""


class _Given(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    workload: str | None = Field(None, min_length=1, max_length=128)
    slo: Duration | None = Field(None, gt=0, le=MAX_SLO_S)
    min_quality: float | None = Field(None, ge=0, le=1)
    slo_kind: Literal["ttft", "jct"] = "ttft"
    output_tokens: int = Field(0, ge=0, le=2**31)


@dataclass(frozen=True)
class RequestOptions:
    """Per request; None takes the deployment's setting. slo_s counts from the request's arrival."""

    workload: str | None = None
    slo_s: float | None = None
    min_quality: float | None = None
    slo_kind: Literal["ttft", "jct"] = "ttft"
    output_tokens: int = 0

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None) -> Self:
        """From ``{"workload": "code", "slo": "200ms", "min_quality": 0.97}``; other keys are somebody else's.

        Raises:
            ConfigError: a value is out of range; the path names its key.
        """
        if given is None:
            return cls()
        if not isinstance(given, Mapping):
            raise ConfigError(f"request options must be a table like {{'slo': '2s'}}, got {type(given).__name__}")
        try:
            read = _Given.model_validate(dict(given))
        except ValidationError as error:
            raise config_error(error, _Given, dict(given), "request option") from None
        return cls(read.workload, read.slo, read.min_quality, read.slo_kind, read.output_tokens)
