"""The settings that are tables of their own. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvserve_core.component import ComponentSpec
from kvserve_core.errors import ConfigError
from kvserve_core.units import Size


class PeerSettings(BaseModel):
    """What is assumed of a consumer that is not known when its cache is encoded."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    accept: Literal["portable", "any"] = Field("portable", description="formats to write for unknown consumers")
    """``portable``: formats that decode on CPU and on CUDA. ``any``: all that is installed here."""


class TransportSettings(BaseModel):
    """``name`` picks the transport; each table ``[transport.<name>]`` is that component's configuration."""

    model_config = ConfigDict(frozen=True, extra="allow")
    __pydantic_extra__: dict[str, dict[str, Any]]
    name: str = Field("tcp", min_length=1, description="the transport that is used")

    def spec(self, name: str = "") -> ComponentSpec:
        """The chosen transport with its table, as the registry creates it."""
        name = name or self.name
        return ComponentSpec(name=name, configuration=self.tables.get(name, {}))

    @property
    def tables(self) -> dict[str, dict[str, Any]]:
        """Configuration tables by transport."""
        return dict(self.__pydantic_extra__ or {})


class GpuSettings(BaseModel):
    """How much of a GPU encoding and decoding take from the engine; without one, nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    sms: int = Field(0, ge=0, description="multiprocessors for encoding and decoding; 0: all")
    batch_bytes: Size = Field(
        128 * 2**20, ge=2**20, le=2**28, description="original bytes coded at a time; two batches are held"
    )


class CpuSettings(BaseModel):
    """How much of the host decoding takes from an engine that computes on a CPU."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    decoders: int = Field(0, ge=0, description="threads that decode at a time; 0: half the cores, on a GPU two")
    decode_share: float = Field(0.4, gt=0, le=1, description="part of its time that one decodes beside a running batch")


def check_units(leaves: Iterable[tuple[str, Any]]) -> None:
    """Refuse a bandwidth that is a bare number: who writes ``20`` seldom means 20 bytes a second.

    leaves: paths of settings and their values, as they were given.

    Raises:
        ConfigError: says which, and what to write.
    """
    for path, value in leaves:
        a_rate = path.endswith("bandwidth") or path.startswith("priors.")
        if a_rate and isinstance(value, (int, float)) and value > 0:
            raise ConfigError(
                f"bandwidth {value} has no unit; write for example '{value:g}Gbps' or '{value:g}B/s'", path
            )
