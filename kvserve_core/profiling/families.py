"""A search space as text: families of pipelines, each a pattern in which some values are left open.

In a pattern a component's configuration may hold, in place of a value:

- nothing: a ``Tunable`` field that is not written is searched over what it offers; any other keeps its default.
- ``{"$try": [12, 8]}``: these values.
- ``{"$of": "step", "times": [0.12]}``: a multiple of another field of the same chain.
- ``{"$artefact": "heads"}``: the blake3 of a calibrated file, or with ``"field": "per"`` what is known of it. A family
  without that file is left out.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kvserve_core.component import ComponentSpec, config_error
from kvserve_core.errors import ConfigError, did_you_mean
from kvserve_core.json_text import parsed
from kvserve_core.spec import Plane

TRY, OF, TIMES, ARTEFACT, FIELD = "$try", "$of", "times", "$artefact", "field"
OTHERS = "*"
"""In a slot: every installed component that no family names and ``without`` does not leave out."""


class _Text(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Slots(_Text):
    """What may stand in the slots of one chain. transforms: alternatives, each a sequence."""

    transforms: tuple[tuple[ComponentSpec, ...], ...] = ((),)
    quantizer: tuple[ComponentSpec, ...] = Field(min_length=1)
    codec: tuple[ComponentSpec, ...] = Field(min_length=1)


class Family(_Text):
    """Pipelines of one method.

    planes: as in a pipeline, ``k`` and ``v`` with values of their own, ``kv``, or ``*``. same: what the planes must
    share, such as ``codec`` or ``mixhq.low_ratio``. constraints: ``"high.levels >= low.levels"``, within each chain.
    artefact: start of the names of calibrated files; the family is made once for each, with ``{"$artefact": "*"}`` for
    that file and its layers a segment. layer_block, sink_tokens, raw_layers: what to try of each.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    about: str = ""
    planes: Mapping[Plane, Slots] = Field(min_length=1)
    same: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    artefact: str = ""
    layer_block: tuple[Annotated[int, Field(ge=1)], ...] = Field((1,), min_length=1)
    sink_tokens: tuple[Annotated[int, Field(ge=0)], ...] = Field((4,), min_length=1)
    raw_layers: tuple[tuple[int, ...], ...] = Field(((),), min_length=1)


class SpaceConfig(_Text):
    """Families, and components that are left out wherever they appear. only: names of families, if not all are wanted.

    Families that are not wanted still count as naming their components, so ``*`` means the same.
    """

    families: tuple[Family, ...] = Field(min_length=1)
    without: tuple[str, ...] = ()
    only: tuple[str, ...] = ()

    @field_validator("families")
    @classmethod
    def _distinct(cls, families: tuple[Family, ...]) -> tuple[Family, ...]:
        names = [f.name for f in families]
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise ValueError(f"names of families must differ, but {', '.join(map(repr, twice))} is used more than once")
        return families

    @model_validator(mode="after")
    def _known(self) -> Self:
        names = [f.name for f in self.families]
        if unknown := next((name for name in self.only if name not in names), None):
            raise ValueError(did_you_mean(unknown, names, "family"))
        return self

    @property
    def wanted(self) -> tuple[Family, ...]:
        """The families to build."""
        return tuple(f for f in self.families if not self.only or f.name in self.only)

    @classmethod
    def parse(cls, value: Any, path: str = "") -> SpaceConfig:
        """From a dict.

        Raises:
            ConfigError: with the path of the first bad field.
        """
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise config_error(error, cls, value).under(path) from None

    @classmethod
    def read(cls, path: Path) -> SpaceConfig:
        """From a JSON or TOML file.

        Raises:
            ConfigError: it cannot be read, or a field is wrong.
        """
        try:
            text = path.read_text(encoding="utf-8")
            raw = tomllib.loads(text) if path.suffix == ".toml" else parsed(text)
        except (OSError, ValueError, RecursionError) as error:  # RecursionError: TOML that is nested too deep
            raise ConfigError(f"cannot be read: {error}", str(path)) from error
        return cls.parse(raw, str(path))


def shipped() -> SpaceConfig:
    """What is searched when nothing else is said: the built-in methods, and whatever else is installed."""
    return SpaceConfig.parse(parsed(files(__package__).joinpath("families.json").read_text(encoding="utf-8")))


def named(config: SpaceConfig) -> frozenset[str]:
    """Every component that a family or ``without`` names: what ``*`` does not stand for."""
    found = set(config.without)
    for family in config.families:
        for slots in family.planes.values():
            for spec in (*(t for alternative in slots.transforms for t in alternative), *slots.quantizer, *slots.codec):
                found |= {spec.name, *_nested(spec.configuration)}
    return frozenset(found)


def _nested(configuration: Mapping[str, Any]) -> set[str]:
    return {str(v["name"]) for v in configuration.values() if isinstance(v, Mapping) and "name" in v}
