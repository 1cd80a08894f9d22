"""Demands on every component: its configuration as JSON, and what its manifest and class say of it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from kvserve_core.component import KINDS, Capabilities, ComponentConfig, tunables
from kvserve_core.errors import ConfigError
from kvserve_core.registry import summary_of
from kvserve_core.testing.check import STAGES, check
from kvserve_core.testing.subject import Subject, require

SUMMARY_CHARS = 90
UNKNOWN = "no_such_field"


def installed(subject: Subject) -> bool:
    """Whether it came from a registry, and so has a manifest."""
    return subject.registry is not None


def refused(model: type[BaseModel], values: dict[str, Any], naming: str) -> bool:
    """Whether pydantic refuses these values with an error that names the field."""
    try:
        model.model_validate(values)
    except ValidationError as error:
        return naming in str(error)
    return False


@check(*KINDS)
def instance(subject: Subject) -> None:
    """It can be created, twice over, and says what it can do."""
    require(subject.create() is not subject.stage, "it was created twice and is the same object; state is shared")
    caps = getattr(subject.stage, "caps", None)
    require(subject.kind not in STAGES or isinstance(caps, Capabilities), f"caps is {caps!r}, not Capabilities")


@check(*STAGES)
def devices(subject: Subject) -> None:
    """It encodes and decodes somewhere: caps.encode_on and caps.decode_on name a device."""
    for field in ("encode_on", "decode_on"):
        require(getattr(subject.caps, field), f"caps.{field} is empty, so no pipeline can use it")


@check(*KINDS)
def configuration(subject: Subject) -> None:
    """It survives JSON, is frozen, refuses unknown fields and is of the class's own Config."""
    config = subject.config
    own, cls = type(subject.stage).Config, type(config)
    require(isinstance(config, ComponentConfig), f"config is a {cls.__name__}, not a ComponentConfig")
    require(cls is own, f"config is a {cls.__name__}, the class's Config is {own.__name__}")
    again = cls.model_validate_json(config.model_dump_json())
    require(again == config, f"JSON gave {again!r}, it was {config!r}")
    require(refused(cls, {**config.model_dump(), UNKNOWN: 1}, UNKNOWN), "an unknown field is not refused")
    require(cls.model_config.get("frozen"), "it is not frozen; keep ComponentConfig's model_config")


@check(*KINDS)
def tunable_choices(subject: Subject) -> None:
    """Every value that a Tunable field offers the profiler is a valid one."""
    config = subject.config
    for name, spec in tunables(type(config)).items():
        offered = spec.choices or (spec.low, spec.high)
        for value in offered:
            values = {**config.model_dump(mode="json"), name: value}
            require(not refused(type(config), values, name), f"field {name!r} offers {value!r} and refuses it")


@check(*KINDS, when=installed)
def summary(subject: Subject) -> None:
    """The manifest's summary is the first docstring line of the class, one short sentence."""
    if subject.registry is None:
        raise ConfigError("a summary belongs to a registered component")
    said = subject.registry.manifest(subject.kind, subject.name).component.summary
    first = summary_of(type(subject.stage))
    require(said == first, f"the manifest says {said!r}, the docstring {first!r}")
    require(0 < len(said) <= SUMMARY_CHARS, f"{len(said)} characters, at most {SUMMARY_CHARS} fit a row")


@check(*STAGES)
def format_versions(subject: Subject) -> None:
    """The version it writes is one that it reads, and versions are positive numbers."""
    stage = subject.stage
    require(stage.format_version in stage.reads, f"writes version {stage.format_version}, reads {sorted(stage.reads)}")
    require(min(stage.reads) >= 1, f"reads {sorted(stage.reads)}; versions begin at 1")


@check(*STAGES)
def declared_artefacts(subject: Subject) -> None:
    """A configuration that names calibrated files says so in its capabilities."""
    names = subject.stage.artefacts
    require(subject.caps.artefacts or not names, "it reads artefacts, but caps.artefacts is False")
