"""Profiles and the library that holds them: what was measured of each pipeline for one model. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import astuple
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from kvserve_core import library_files
from kvserve_core.artefacts import Artefacts
from kvserve_core.bandwidth import MAX_SECONDS
from kvserve_core.component import ComponentSpec, Kind, config_error
from kvserve_core.errors import ConfigError
from kvserve_core.latency import Line, Speed, latency_line
from kvserve_core.policy import LOSSLESS, RAW
from kvserve_core.profile import GPU_CUT, LOSSLESS_PIPELINE, RAW_PIPELINE, Chain, PipelineSpec

SCHEMA_VERSION = 1
DEFAULT_WORKLOAD = "default"
EXACT = {RAW: RAW_PIPELINE, LOSSLESS: LOSSLESS_PIPELINE}
"""Names that are reserved for pipelines which lose nothing."""


def _speed(value: Speed) -> Speed:
    for seconds in (value.fixed_s, value.s_per_byte):
        if not 0 <= seconds <= MAX_SECONDS:
            raise ValueError(f"must be from 0 to {MAX_SECONDS:g}, got {seconds}")
    return value


SpeedField = Annotated[Speed, AfterValidator(_speed)]
"""``{"fixed_s": 0.001, "s_per_byte": 4e-10}``, both of original bytes."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class QualityRecord(_Model):
    """Quality of a profile on one workload, relative to uncompressed KV (1.0), with its confidence bounds."""

    value: float = Field(ge=0)
    lower: float = Field(ge=0)
    upper: float = Field(ge=0)
    metric: str = Field(min_length=1)
    samples: int = Field(ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.lower <= self.value <= self.upper:
            raise ValueError(f"lower <= value <= upper must hold, got {self.lower}, {self.value}, {self.upper}")
        return self


class Profile(_Model):
    """A pipeline and what it costs. ``encode`` is the producer's speed, ``decode`` the consumer's.

    cr: effective, original bytes over wire bytes with metadata, exempt tokens and headers counted.
    artefacts: blake3 hashes of the calibrated files that the pipeline reads.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    pipeline: PipelineSpec
    cr: float = Field(ge=1e-3, le=1e6)
    encode: SpeedField
    decode: SpeedField
    quality: Mapping[str, QualityRecord] = Field(default_factory=dict)
    artefacts: tuple[str, ...] = ()
    notes: str = ""

    @model_validator(mode="before")
    @classmethod
    def _built_in(cls, given: Any) -> Any:
        """``raw`` and ``lossless`` are stored without a pipeline: it is what this version calls by that name."""
        if isinstance(given, dict) and given.get("name") in EXACT and "pipeline" not in given:
            return given | {"pipeline": EXACT[given["name"]]}
        return given

    @model_validator(mode="after")
    def _reserved(self) -> Self:
        if self.pipeline != EXACT.get(self.name, self.pipeline):
            raise ValueError(f"the name {self.name!r} is reserved for the built-in exact pipeline; rename the profile")
        return self

    @property
    def exact(self) -> bool:
        """Whether it is one of the built-in profiles that lose nothing."""
        return self.name in EXACT

    def quality_for(self, workload: str) -> QualityRecord | None:
        """The record of a workload, else that of ``default``, else None."""
        return self.quality.get(workload) or self.quality.get(DEFAULT_WORKLOAD)

    def on(self, device: str) -> Profile:
        """The same where it is encoded on ``device``: the built-in pipelines are cut for a GPU."""
        if not self.exact or device != "cuda":
            return self
        return self.model_copy(update={"pipeline": self.pipeline.model_copy(update=GPU_CUT)})

    @property
    def worst_quality(self) -> float:
        """The lower quality bound over all workloads, for what is stored: nobody knows who will read it."""
        return 1.0 if self.exact else min((record.lower for record in self.quality.values()), default=0.0)

    def line(self, nbytes: float, model_s: float = 0.0) -> Line:
        """Eq. 1 for ``nbytes`` original bytes."""
        return latency_line(nbytes, self.cr, self.encode, self.decode, model_s)


def built_in(name: str, cr: float, encode: Speed, decode: Speed) -> Profile:
    """``raw`` or ``lossless`` with measured figures."""
    return Profile(name=name, pipeline=EXACT[name], cr=cr, encode=encode, decode=decode)


RAW_PROFILE = built_in(RAW, 1.0, Speed.of(4e9), Speed.of(4e9))
LOSSLESS_PROFILE = built_in(LOSSLESS, 1.3, Speed.of(0.25e9), Speed.of(0.5e9))
"""Cautious figures of one CPU core, for use until something was measured."""


class ProfileLibrary(_Model):
    """All profiles of one model on one device. ``provenance`` says how they were measured."""

    schema_version: int = SCHEMA_VERSION
    model_id: str
    fingerprint: str
    device: str
    created: str
    provenance: Mapping[str, Any] = Field(default_factory=dict)
    profiles: tuple[Profile, ...] = ()
    _artefacts: Artefacts = PrivateAttr(default_factory=Artefacts)

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        if self.schema_version != SCHEMA_VERSION:
            raise ValueError(
                f"schema_version is {self.schema_version}, this kvserve reads {SCHEMA_VERSION}; upgrade it"
            )
        names = [p.name for p in self.profiles]
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise ValueError(f"profile names must differ, but {', '.join(map(repr, twice))} is used more than once")
        return self

    @property
    def artefacts(self) -> Artefacts:
        """The calibrated files that came with the library."""
        return self._artefacts

    def with_artefacts(self, artefacts: Artefacts) -> ProfileLibrary:
        """The same library over these files."""
        other = self.model_copy()
        other._artefacts = artefacts
        return other

    def profile(self, name: str) -> Profile | None:
        """The profile of that name; ``raw`` and ``lossless`` always exist."""
        built_ins = {RAW: RAW_PROFILE, LOSSLESS: LOSSLESS_PROFILE}
        return next((p for p in self.profiles if p.name == name), built_ins.get(name))

    @property
    def workloads(self) -> tuple[str, ...]:
        """Those that any profile was measured on, sorted."""
        return tuple(sorted({workload for p in self.profiles for workload in p.quality}))

    @property
    def digest(self) -> str:
        """Of what estimates are made of: the model, and the names, ratios and speeds of its profiles."""
        made = [self.fingerprint, *((p.name, p.cr, *astuple(p.encode), *astuple(p.decode)) for p in self.profiles)]
        return sha256(json.dumps(made).encode()).hexdigest()

    def missing(self, profile: Profile) -> tuple[str, ...]:
        """Artefacts a profile reads that are not here."""
        return tuple(a for a in profile.artefacts if a not in self.artefacts.hashes)

    def check(self, create: Callable[[Kind, ComponentSpec, str], object]) -> None:
        """Create every component once with ``Registry.create``, so that a wrong field is found at start-up.

        Raises:
            ConfigError: its path is the field's, e.g. ``profiles.fast.planes.k.quantizer.configuration.levels``.
        """
        for profile in self.profiles:
            for plane, chain in profile.pipeline.planes.items():
                for kind, spec, slot in _stages(chain):
                    create(kind, spec, f"profiles.{profile.name}.planes.{plane}.{slot}")

    @classmethod
    def parse(cls, text: bytes | str, artefacts: Artefacts | None = None) -> ProfileLibrary:
        """From the JSON of ``library.json``.

        Raises:
            ConfigError: with the path of the first bad field, profiles by their name.
        """
        raw = library_files.json_of(text)
        try:
            return cls.model_validate(raw).with_artefacts(artefacts or Artefacts())
        except ValidationError as error:
            found = config_error(error, cls, raw)
            raise ConfigError(found.reason, _named(found.path, raw)) from None

    @classmethod
    def load(cls, path: str | Path) -> ProfileLibrary:
        """From a folder or a ``.kvlib`` file.

        Raises:
            ConfigError: it is not there, not a library, or a field is wrong.
        """
        text, artefacts = library_files.read(Path(path))
        return cls.parse(text, artefacts)

    def save(self, path: str | Path) -> None:
        """To a folder, or to one file when the name ends in ``.kvlib``. A reader sees the old or the new one.

        Raises:
            ArtefactError: a profile names an artefact that is not here.
        """
        used = sorted({a for p in self.profiles for a in p.artefacts})
        blobs = {digest: self.artefacts.read(digest) for digest in used}
        stored = self.model_dump(mode="json")
        for profile in stored["profiles"]:
            if profile["name"] in EXACT:
                del profile["pipeline"]
        library_files.write(Path(path), json.dumps(stored, indent=2).encode() + b"\n", blobs)


def usual_workload(library: ProfileLibrary | None) -> str:
    """The workload that is meant where none is named: the only one that a library was measured on, else the default."""
    measured = library.workloads if library else ()
    return measured[0] if len(measured) == 1 else DEFAULT_WORKLOAD


def _stages(chain: Chain) -> list[tuple[Kind, ComponentSpec, str]]:
    found: list[tuple[Kind, ComponentSpec, str]] = [
        ("transform", spec, f"transforms.{i}") for i, spec in enumerate(chain.transforms)
    ]
    return [*found, ("quantizer", chain.quantizer, "quantizer"), ("codec", chain.codec, "codec")]


def _named(path: str, raw: dict[str, Any]) -> str:
    """``profiles.3.pipeline.sink_tokens`` -> ``profiles.balanced.sink_tokens``: names for numbers, no ``pipeline``."""
    parts = path.split(".")
    if parts[0] == "profiles" and parts[1:]:
        given = raw["profiles"][int(parts[1])]
        parts[1] = str(given["name"]) if isinstance(given, dict) and "name" in given else f"[{parts[1]}]"
        if parts[2:3] == ["pipeline"] and len(parts) > 3:
            del parts[2]
    return ".".join(parts)
