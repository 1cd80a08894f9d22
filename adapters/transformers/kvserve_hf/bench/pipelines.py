"""What is measured: families of pipelines, each a template and the values it is tried at.

A file is ``{"families": [...]}``; :class:`Family` says what an entry holds. In a template ``{"$": "step"}`` stands for
the value named ``step``, ``{"$": "step", "times": 0.7}`` for a multiple of it, and ``{"$artefact": "klt-head-15"}`` for
the blake3 of ``klt-head-15.safetensors`` (or ``.json``) in the folder of calibrated files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvserve_core import library_files
from kvserve_core.artefacts import Artefacts
from kvserve_core.component import ComponentSpec, Kind, config_error
from kvserve_core.errors import ArtefactError, ConfigError, UnknownNameError, did_you_mean
from kvserve_core.profile import Chain, PipelineSpec
from kvserve_core.registry import Registry

Number = int | float
SUFFIXES = (".safetensors", ".json")
VALUE, TIMES, ARTEFACT = "$", "times", "$artefact"


class Family(BaseModel):
    """Pipelines that differ in some numbers only: points of one curve of ratio against quality.

    calibrated: what was learned and from what; empty for none. values: one pipeline for each, ``{}`` for a template
    without values.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    about: str = ""
    calibrated: str = ""
    values: tuple[Mapping[str, Number], ...] = ({},)
    pipeline: Mapping[str, Any]


@dataclass(frozen=True)
class Candidate:
    """One pipeline to measure, or why it cannot be. artefacts: name -> bytes of what it reads."""

    name: str
    family: Family
    values: Mapping[str, Number]
    spec: PipelineSpec | None
    artefacts: Mapping[str, int]
    problem: str = ""


class Calibrated:
    """Calibrated files by name; :attr:`artefacts` by their hash. The source is a folder, or a library of profiles."""

    def __init__(self, source: Path | None = None) -> None:
        self._hashes: dict[str, str] = {}
        self._sizes: dict[str, int] = {}
        self.artefacts = Artefacts()
        if source is None:
            return
        if source.suffix == ".kvlib" or (source / "library.json").exists():
            _, self.artefacts = library_files.read(source)
        elif source.is_dir():
            self._add_files(source)
        else:
            raise ConfigError(f"{str(source)!r} is no folder and no library; name one", "calibrated")

    def _add_files(self, folder: Path) -> None:
        blobs: dict[str, bytes | Path] = {}
        for path in sorted(p for p in folder.iterdir() if p.suffix in SUFFIXES):
            digest = blake3(path.read_bytes()).hexdigest()
            self._hashes[path.stem], self._sizes[digest], blobs[digest] = digest, path.stat().st_size, path
        self.artefacts = Artefacts(blobs)

    def digest(self, name: str) -> str:
        """The hash of a file.

        Raises:
            ArtefactError: it is not there.
        """
        if name not in self._hashes:
            held = ", ".join(sorted(self._hashes)) or "none"
            raise ArtefactError(f"no calibrated file {name!r}; there are: {held}; make it with 'kvserve calibrate'")
        return self._hashes[name]

    def sizes(self, digests: frozenset[str]) -> dict[str, int]:
        """Name (or hash) -> bytes."""
        names = {digest: name for name, digest in self._hashes.items()}
        return {names.get(d, d): self._sizes.get(d) or len(self.artefacts.read(d)) for d in sorted(digests)}


def read_families(path: Path) -> list[Family]:
    """The families of a file; ``{"name": {pipeline spec}}``, as ``kvserve measure`` reads it, gives one each.

    Raises:
        ConfigError: it cannot be read, or a field is wrong; the message starts with the field's path.
    """
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f'{path} must hold an object, {{"families": [...]}}, got {type(raw).__name__}')
    if "families" not in raw:
        return [_family({"name": name, "pipeline": spec}, name) for name, spec in raw.items()]
    return [_family(entry, f"families.{i}") for i, entry in enumerate(raw["families"])]


def _family(raw: Any, path: str) -> Family:
    try:
        return Family.model_validate(raw)
    except ValidationError as error:
        raise config_error(error, Family, raw).under(path) from None


def shipped(model_type: str) -> list[Family]:
    """The families that ship for a type of model, ``llama`` or ``gemma3_text``; others get those of ``llama``."""
    folder = files("kvserve_hf").joinpath("bench")
    name = "gemma3" if model_type.startswith("gemma3") else "smollm2"
    with as_file(folder.joinpath(f"pipelines_{name}.json")) as path:
        return read_families(path)


def named_families(families: Sequence[Family], names: Sequence[str] | None) -> list[Family]:
    """The named ones, in the order in which they were named; all without names.

    Raises:
        UnknownNameError: there is no such family.
    """
    known = {f.name: f for f in families}
    for name in names or ():
        if name not in known:
            raise UnknownNameError(did_you_mean(name, known, "family"))
    return [known[name] for name in names or known]


def candidates(families: Sequence[Family], calibrated: Calibrated, registry: Registry) -> Iterator[Candidate]:
    """Every pipeline of every family. What is not installed or not calibrated is a candidate with a problem."""
    for family in families:
        for values in family.values:
            name = family.name + "".join(f",{key}={value:g}" for key, value in values.items())
            try:
                raw = filled(family.pipeline, values, calibrated)
                spec = PipelineSpec.model_validate(raw)
                used = _check(spec, registry, name)
                yield Candidate(name, family, values, spec, calibrated.sizes(used))
            except ValidationError as error:
                raise config_error(error, PipelineSpec, raw).under(name) from None
            except (ConfigError, ArtefactError) as error:
                yield Candidate(name, family, values, None, {}, str(error))


def filled(template: Any, values: Mapping[str, Number], calibrated: Calibrated) -> Any:
    """A template with its values in place.

    Raises:
        ConfigError: a value that the family does not give. ArtefactError: a file that is not there.
    """
    if isinstance(template, Mapping):
        if ARTEFACT in template:
            return calibrated.digest(template[ARTEFACT])
        if VALUE in template:
            return _value(template, values)
        return {key: filled(value, values, calibrated) for key, value in template.items()}
    if isinstance(template, (list, tuple)):
        return [filled(value, values, calibrated) for value in template]
    return template


def _value(template: Mapping[str, Any], values: Mapping[str, Number]) -> Number:
    name, times = template[VALUE], template.get(TIMES)
    if name not in values:
        raise ConfigError(f"the template names {name!r}, the values are {sorted(values)}")
    return values[name] if times is None else float(f"{values[name] * times:.6g}")


def _check(spec: PipelineSpec, registry: Registry, path: str) -> frozenset[str]:
    """The artefacts that a pipeline reads, once all its components could be created."""
    used: set[str] = set()
    for plane, chain in spec.planes.items():
        for kind, component in _stages(chain):
            used |= registry.create(kind, component, f"{path}.planes.{plane}").artefacts
    return frozenset(used)


def _stages(chain: Chain) -> list[tuple[Kind, ComponentSpec]]:
    transforms: list[tuple[Kind, ComponentSpec]] = [("transform", t) for t in chain.transforms]
    return [*transforms, ("quantizer", chain.quantizer), ("codec", chain.codec)]
