"""A component's manifest, its spec string, its config and its capabilities. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticUndefined

from kvserve_core.errors import ConfigError, did_you_mean
from kvserve_core.spec import DType

API_VERSION = 1
"""What plugins are written against. A manifest with another number is listed as broken, with the reason."""

Kind = Literal["transform", "quantizer", "codec", "transport", "policy", "evaluator", "workload"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Component:
    """One line of a plugin's hook: everything that can be said of a component without importing it.

    name: ``zstd``; third parties use a dotted name, ``acme.rle``.
    target: ``"package.module:Class"``.
    summary: equal to the first line of the class's docstring (tested).
    requires: importable modules it needs; needs: devices it cannot do without (``"cuda"``).
    extra: what to ``pip install`` when a requirement is missing, e.g. ``kvserve[hf]``.
    """

    name: str
    target: str
    summary: str = ""
    requires: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    extra: str | None = None
    api: int = API_VERSION


class ComponentConfig(BaseModel):
    """Base of every component's nested ``Config``: frozen, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ComponentSpec(BaseModel):
    """``"zstd"`` or ``{"name": "zstd", "configuration": {"level": 3}}``; resolved by the registry, not here."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str = Field(min_length=1)
    configuration: Mapping[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: object) -> object:
        return {"name": value} if isinstance(value, str) else value

    def __hash__(self) -> int:
        # Field names only: equal specs must hash alike, and 1 == 1.0 == True while their JSON differs.
        return hash((self.name, frozenset(self.configuration)))


@dataclass(frozen=True)
class TunableSpec:
    """What the profiler may try for a field: a list of choices, or a range (optionally logarithmic).

    when: it matters only while these fields of the same configuration have one of these values.
    """

    choices: tuple[Any, ...] = ()
    low: float | None = None
    high: float | None = None
    log: bool = False
    when: tuple[tuple[str, tuple[Any, ...]], ...] = ()


def Tunable(  # noqa: N802  # reads as a field type, like pydantic's Field
    default: Any = PydanticUndefined,
    *,
    choices: tuple[Any, ...] = (),
    low: float | None = None,
    high: float | None = None,
    log: bool = False,
    when: Mapping[str, tuple[Any, ...]] = MappingProxyType({}),
    **field: Any,
) -> Any:
    """A config field that the profiler searches. ``field`` goes on to :func:`pydantic.Field`.

    when: ``{"axis": ("group",)}`` for a field that matters only then; otherwise it keeps its default.

    Raises:
        ConfigError: neither choices nor a complete range is given, or the range is empty.
    """
    ranged = low is not None and high is not None
    if bool(choices) == ranged or (not ranged and (low, high) != (None, None)):
        raise ConfigError("a Tunable field needs either choices=(...) or both low= and high=")
    if low is not None and high is not None and not (low < high and (low > 0 or not log)):
        raise ConfigError(f"a Tunable range needs low < high, and 0 < low when log=True; got low={low}, high={high}")
    spec = TunableSpec(choices, low, high, log, tuple(when.items()))
    extra = {"tunable": _as_json(spec), **field.pop("json_schema_extra", {})}
    return Field(default, json_schema_extra=extra, **field)


def _as_json(spec: TunableSpec) -> dict[str, Any]:
    known = {"choices": list(spec.choices), "low": spec.low, "high": spec.high, "log": spec.log}
    return known | ({"when": {name: list(values) for name, values in spec.when}} if spec.when else {})


def tunables(config: type[BaseModel]) -> dict[str, TunableSpec]:
    """The searchable fields of a config class, by name."""
    found: dict[str, TunableSpec] = {}
    for name, field in config.model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and isinstance(tunable := extra.get("tunable"), dict):
            given: dict[str, Any] = dict(tunable)
            when = tuple((other, tuple(values)) for other, values in given.get("when", {}).items())
            found[name] = TunableSpec(tuple(given["choices"]), given["low"], given["high"], given["log"], when)
    return found


ANY = frozenset({"*"})


@dataclass(frozen=True)
class Capabilities:
    """What a stage can do. The defaults are the cautious answer; what is not declared is refused at build.

    exact: T is bitwise invertible; Q and C are lossless. A chain is lossless iff all three are.
    planes: plane names it works on, or ``{"*"}``. dtypes: what it takes (``f32`` is what a lossy transform gives).
    head_local: slicing heads commutes with encoding, so that any tensor-parallel remap works.
    layer_local: likewise for layers, so that a pipeline stage may hold a part of a layer block.
    token_multiple: the region length it needs; the tail that is shorter goes raw.
    artefacts: it reads calibrated files, whose hashes take part in negotiation.
    async_size: a codec whose output size stays on the device until the fence. max_alphabet: what it can code.
    """

    exact: bool = False
    encode_on: frozenset[str] = frozenset({"cpu"})
    decode_on: frozenset[str] = frozenset({"cpu"})
    planes: frozenset[str] = frozenset({"k", "v"})
    dtypes: frozenset[DType] = frozenset({DType.BF16, DType.F16, DType.F32})
    head_local: bool = False
    layer_local: bool = False
    token_multiple: int = 1
    artefacts: bool = False
    async_size: bool = False
    max_alphabet: int = 256


_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
"""What pydantic calls a field that does not exist, of a model and of a dataclass."""


def config_error(error: ValidationError, model: type[BaseModel], raw: object, what: str = "field") -> ConfigError:
    """One of pydantic's complaints as one line with the field's path, and the nearest name for an unknown field.

    The first, but unknown fields before all others: a misspelt field is also a missing one.

    raw: the input, which tells real keys from the labels that pydantic puts into a location for unions.
    """
    errors = error.errors(include_url=False)
    first = next((e for e in errors if e["type"] in _UNKNOWN), errors[0])
    path = ".".join(_keys(first["loc"], raw, first["type"] == "missing"))
    if first["type"] in _UNKNOWN:
        return ConfigError(did_you_mean(str(first["loc"][-1]), _fields_at(model, first["loc"][:-1]), what), path)
    shown = "" if first["type"] in ("value_error", "missing") else f", got {first['input']!r:.200}"
    return ConfigError(first["msg"].removeprefix("Value error, ") + shown, path)


def _keys(loc: tuple[int | str, ...], raw: object, missing: bool) -> list[str]:
    found: list[str] = []
    for key in loc:
        inside = isinstance(raw, Mapping) and key in raw
        inside |= isinstance(raw, (list, tuple)) and isinstance(key, int) and key < len(raw)
        if inside:
            raw = raw[key]  # type: ignore[index]  # ``inside`` says that it can be indexed
            found.append(str(key))
    return [*found, str(loc[-1])] if missing else found


def _fields_at(model: Any, loc: tuple[int | str, ...]) -> Iterable[str]:
    """Field names of the model or dataclass at ``loc``, through tuples and mappings; none where unions end the way."""
    fields: Mapping[str, Any]
    for key in loc:
        fields = getattr(model, "model_fields", {})
        model = fields[key].annotation if key in fields else (*get_args(model), None)[_item_argument(model)]
    fields = getattr(model, "model_fields", None) or getattr(model, "__dataclass_fields__", {})
    return fields


def _item_argument(annotation: object) -> int:
    """Which type argument is that of the items: ``tuple[X, ...]`` and ``Mapping[K, X]``; -1 (None) for all others."""
    origin = get_origin(annotation)
    return 0 if origin is tuple else 1 if isinstance(origin, type) and issubclass(origin, Mapping) else -1
