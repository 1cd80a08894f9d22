"""From a pattern to every configuration it stands for: of one component, then of one chain."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import isfinite, prod
from typing import Any, get_args

from pydantic import ValidationError

from kvserve_core.component import ComponentSpec, Kind, TunableSpec, config_error, tunables
from kvserve_core.errors import ConfigError, did_you_mean
from kvserve_core.profiling.families import ARTEFACT, FIELD, OF, TIMES, TRY
from kvserve_core.profiling.point import Value, Values

STEPS = 8
"""Values tried of a range."""
DIGITS = 3
"""Significant digits of a value in a range: a name a person can read."""
MOST = 100_000
"""Configurations of one component, and chains of one sequence of components, that are spelt out."""


@dataclass(frozen=True)
class Option:
    """One way to fill a place: ``body`` is what stands there, ``values`` what was chosen to get it."""

    body: Any
    values: Values = ()


@dataclass(frozen=True)
class Multiple:
    """A value that is known when the whole chain is: ``factor`` times its field ``of``."""

    of: str
    factor: float


@dataclass(frozen=True)
class Names:
    """Where patterns look things up.

    config: the Config class of a component. artefact: what is known of a calibrated file, by its name and ``digest``
    or another field.
    """

    config: Callable[[Kind, str], Any]
    artefact: Callable[[str, str], Any]


def grid(spec: TunableSpec, whole: bool = False) -> tuple[Any, ...]:
    """What is tried of a tunable field: its choices, or ``STEPS`` values of its range; ``whole`` rounds them.

    Raises:
        ConfigError: a pipeline cannot be written down with such values.
    """
    if spec.low is None or spec.high is None:
        return tuple(_written(choice) for choice in spec.choices)
    low, high = spec.low, spec.high
    at = [i / (STEPS - 1) for i in range(STEPS)]
    values = [low * (high / low) ** t if spec.log else low + (high - low) * t for t in at]
    if not all(map(isfinite, values)):
        raise ConfigError(f"the range from {low} to {high} cannot be cut; give it finite ends that are less far apart")
    inner = [round(v) if whole else float(f"{v:.{DIGITS}g}") for v in values]
    return tuple(dict.fromkeys(min(max(v, low), high) for v in inner))


def _written(choice: Any) -> Any:
    """The choice, if JSON can hold it."""
    try:
        json.dumps(choice, allow_nan=False)
    except (TypeError, ValueError):
        raise ConfigError(f"the choice {choice!r} is no JSON value; offer numbers, text, booleans or lists") from None
    return choice


def _offered(spec: TunableSpec, annotation: Any, dimension: str) -> list[Option]:
    """What a field that is not written is searched over."""
    kinds = get_args(annotation) or (annotation,)
    try:
        return _choices(grid(spec, int in kinds and float not in kinds), dimension)
    except ConfigError as error:
        raise error.under(dimension) from None


def require_few(ways: Sequence[Sequence[Option]], where: str) -> None:
    """That all combinations can be spelt out.

    Raises:
        ConfigError: there are too many.
    """
    if (count := prod(map(len, ways))) > MOST:
        raise ConfigError(f"{count} combinations are too many to list; give fewer values with '$try'", where)


def component(kind: Kind, pattern: ComponentSpec, prefix: str, names: Names) -> list[Option]:
    """Every configuration of a component; bodies are ``{"name": ..., "configuration": {...}}``.

    Raises:
        ConfigError: a field that it does not have, a pattern that says nothing, or too many configurations.
    """
    config = names.config(kind, pattern.name)
    offered, fields = tunables(config), config.model_fields
    if unknown := sorted(set(pattern.configuration) - set(fields)):
        raise ConfigError(did_you_mean(unknown[0], fields, f"field of {pattern.name!r}"), prefix)
    open_fields = [name for name in fields if name in pattern.configuration or name in offered]
    ways = [
        _given(kind, pattern.configuration[f], f"{prefix}.{f}", names)
        if f in pattern.configuration
        else _offered(offered[f], fields[f].annotation, f"{prefix}.{f}")
        for f in open_fields
    ]
    require_few(ways, prefix)
    found: dict[str, Option] = {}
    for chosen in product(*ways):
        kept = _active(dict(zip(open_fields, chosen, strict=True)), offered)
        body = {"name": pattern.name, "configuration": {f: option.body for f, option in kept.items()}}
        found.setdefault(repr(body), Option(body, merged(option.values for option in kept.values())))
    return list(found.values())


def _active(chosen: dict[str, Option], offered: Mapping[str, TunableSpec]) -> dict[str, Option]:
    """Without the fields that do not matter beside the others."""

    def matters(name: str) -> bool:
        when = offered[name].when if name in offered else ()
        return all(other not in chosen or chosen[other].body in values for other, values in when)

    return {name: option for name, option in chosen.items() if matters(name)}


def _given(kind: Kind, value: Any, where: str, names: Names) -> list[Option]:
    """What a written value stands for."""
    if not isinstance(value, Mapping):
        return [Option(value)]
    if "name" in value:
        return component(kind, _component(value, where), where, names)
    if ARTEFACT in value:
        return [Option(names.artefact(str(value[ARTEFACT]), str(value.get(FIELD, "digest"))))]
    if OF in value:
        made = [Option(Multiple(str(value[OF]), _factor(f, where))) for f in _list(value, TIMES, where)]
        return [Option(o.body, ((where, o.body.factor),)) for o in made] if len(made) > 1 else made
    if TRY in value:
        return _choices(_list(value, TRY, where), where)
    return [Option(dict(value))]


def _component(value: Mapping[str, Any], where: str) -> ComponentSpec:
    try:
        return ComponentSpec.model_validate(value)
    except ValidationError as error:
        raise config_error(error, ComponentSpec, value).under(where) from None


def _factor(value: Any, where: str) -> float:
    if not isinstance(value, (int, float)) or not isfinite(value):
        raise ConfigError(f"{TIMES!r} needs numbers to multiply by, got {value!r}", where)
    return float(value)


def _list(value: Mapping[str, Any], key: str, where: str) -> Sequence[Any]:
    found = value.get(key)
    if not isinstance(found, (list, tuple)) or not found:
        raise ConfigError(f"{key!r} needs a list of values to try, got {found!r}", where)
    return found


def _choices(values: Sequence[Any], dimension: str) -> list[Option]:
    if len(values) == 1:
        return [Option(values[0])]
    return [Option(value, ((dimension, as_value(value)),)) for value in values]


def as_value(value: Any) -> Value:
    """A value as it stands in a point: lists and null as text."""
    return value if isinstance(value, (str, int, float, bool)) else json.dumps(value, separators=(",", ":"))


def merged(values: Iterable[Values]) -> Values:
    """Values of several places one after the other; a dimension that comes twice, once."""
    return tuple(dict(pair for each in values for pair in each).items())


def agree(options: Sequence[Option]) -> bool:
    """Whether they give no dimension two values."""
    seen: dict[str, Value] = {}
    return all(seen.setdefault(name, value) == value for option in options for name, value in option.values)


def chain(parts: Sequence[Option], values: Values) -> Option:
    """Transforms, quantizer and codec as one chain's JSON, with every multiple worked out.

    Raises:
        ConfigError: a multiple of a field that the chain does not have.
    """
    *transforms, quantizer, codec = (part.body for part in parts)
    body = {"transforms": transforms, "quantizer": quantizer, "codec": codec}
    numbers = dict(_numbers(parts))
    return Option(_settled(body, numbers), merged([values, *(part.values for part in parts)]))


def _numbers(parts: Sequence[Option]) -> Iterator[tuple[str, float]]:
    for part in parts:
        for name, value in part.body["configuration"].items():
            if isinstance(value, (int, float)):
                yield name, value


def _settled(body: Any, numbers: Mapping[str, float]) -> Any:
    if isinstance(body, Multiple):
        if body.of not in numbers:
            raise ConfigError(did_you_mean(body.of, numbers, "number of this chain"), OF)
        return float(f"{body.factor * numbers[body.of]:.6g}")
    if isinstance(body, dict):
        return {key: _settled(value, numbers) for key, value in body.items()}
    return [_settled(item, numbers) for item in body] if isinstance(body, list) else body
