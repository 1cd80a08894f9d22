"""``kvserve show NAME``: one component in full."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import asdict
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from pydantic import BaseModel

from kvserve_core.cli.output import AsJson, OfKind, kind_of, print_json, print_table
from kvserve_core.component import KINDS, Kind, tunables
from kvserve_core.errors import ConfigError, UnavailableComponentError, UnknownNameError, did_you_mean
from kvserve_core.registry import Registry, default_registry, locate, source_of, unavailable

_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
Name = Annotated[str, typer.Argument(help="A component's name.")]


def show(name: Name, kind: OfKind = None, as_json: AsJson = False) -> None:
    """Show one component: fields, capabilities and an example."""
    registry = default_registry()
    chosen = kind_of(kind) if kind else only_kind(registry, name)
    about = describe(registry, chosen, name)
    if as_json:
        print_json(about)
    else:
        _print(about)


def only_kind(registry: Registry, name: str) -> Kind:
    """The kind of the component of this name.

    Raises:
        UnknownNameError: nothing has it. ConfigError: components of several kinds do.
    """
    kinds = [kind for kind in KINDS if name in registry.names(kind)]
    if not kinds:
        broken = [row for row in registry.rows() if row.name == name]
        if broken:
            raise UnavailableComponentError(f"{broken[0].kind} {name!r} is broken: {broken[0].reason}")
        known = {n for kind in KINDS for n in registry.names(kind)}
        raise UnknownNameError(did_you_mean(name, known, "component"))
    if len(kinds) > 1:
        listed = " or ".join(f"'--kind {kind}'" for kind in kinds)
        raise ConfigError(f"{name!r} is the name of a {' and a '.join(kinds)}; add {listed}")
    return kinds[0]


def describe(registry: Registry, kind: Kind, name: str) -> dict[str, Any]:
    """Manifest, status and, where its class can be imported, all that the class says of itself.

    Raises:
        UnknownNameError: nothing installed has this name.
    """
    manifest = registry.manifest(kind, name)
    spec = locate(manifest.component.target.partition(":")[0])
    about: dict[str, Any] = {
        "kind": kind,
        "name": name,
        "status": "ok",
        "reason": "",
        "provider": manifest.provider.distribution,
        "version": manifest.provider.version,
        "plugin": manifest.provider.plugin,
        "source": source_of(manifest.component),
        "file": spec.origin if spec else None,
        **_plain({k: v for k, v in asdict(manifest.component).items() if k != "name"}),
        "example": example(name),
    }
    try:
        return about | _of_class(registry.load(kind, name), name)
    except UnavailableComponentError as error:
        status = "unavailable" if unavailable(manifest.component) else "broken"
        return about | {"status": status, "reason": error.reason}


def _of_class(cls: Any, name: str) -> dict[str, Any]:
    fields = config_fields(cls.Config)
    about: dict[str, Any] = {"docstring": inspect.getdoc(cls) or "", "config": fields, "example": example(name, fields)}
    if hasattr(cls, "caps"):
        about["capabilities"] = _plain(asdict(cls.caps))
        about["format_version"] = cls.format_version
        about["reads"] = sorted(cls.reads)
    if hasattr(cls, "staging"):
        about["capabilities"] = {"staging": cls.staging, "persistent": cls.persistent}
    return about


def config_fields(config: type[BaseModel]) -> list[dict[str, Any]]:
    """Name, type, default, allowed values, tunable range and description of each field."""
    schema = config.model_json_schema()
    searchable = tunables(config)
    found = []
    for name, field in config.model_fields.items():
        rules = schema["properties"].get(field.alias or name, {})
        found.append(
            {
                "name": name,
                "type": _type(field.annotation),
                "required": field.is_required(),
                "default": None if field.is_required() else _plain(field.get_default(call_default_factory=True)),
                "allowed": _allowed(rules, schema.get("$defs", {})),
                "tunable": _plain(asdict(searchable[name])) if name in searchable else None,
                "description": field.description or "",
            }
        )
    return found


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin in (Union, UnionType):
        return " | ".join(map(_type, arguments))
    if annotation is NoneType:
        return "None"
    if annotation is Ellipsis:
        return "..."
    if inspect.isclass(origin) and arguments:
        return f"{origin.__name__}[{', '.join(map(_type, arguments))}]"
    return annotation.__name__ if inspect.isclass(annotation) else str(annotation).replace("typing.", "")


def _allowed(rules: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    if "$ref" in rules:
        rules = definitions.get(rules["$ref"].rpartition("/")[2], {})
    if "enum" in rules or "const" in rules:
        return " | ".join(json.dumps(v) for v in rules.get("enum", [rules.get("const")]))
    bounds = [f"{sign} {rules[key]}" for key, sign in _BOUNDS.items() if key in rules]
    if not bounds and "anyOf" in rules:
        return " | ".join(filter(None, (_allowed(option, definitions) for option in rules["anyOf"])))
    return ", ".join(bounds)


def example(name: str, fields: list[dict[str, Any]] | None = None) -> Any:
    """What stands for this component in a pipeline: its name, or its name with all fields at their defaults."""
    given = {f["name"]: f"<{f['type']}>" if f["required"] else f["default"] for f in fields or ()}
    return {"name": name, "configuration": given} if given else name


def _plain(value: Any) -> Any:
    """JSON-able: sets sorted, enumerations and models by value."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(_plain, value))
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, Enum):
        return _plain(value.value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _print(about: dict[str, Any]) -> None:
    typer.echo(f"{about['kind']} {about['name']}: {about['status']}{about['reason'] and ', ' + about['reason']}")
    typer.echo(f"from {about['provider']} {about['version']}, {about['file'] or about['source']}\n")
    typer.echo(about.get("docstring") or about["summary"])
    if about.get("config"):
        columns = ("field", "type", "default", "allowed", "tunable", "description")
        cells = [
            (f["name"], f["type"], _default(f), f["allowed"], _range(f["tunable"]), f["description"])
            for f in about["config"]
        ]
        print_table("\nconfiguration", columns, cells)
    if "capabilities" in about:
        rows = [(key, json.dumps(value)) for key, value in about["capabilities"].items()]
        rows += [(key, json.dumps(about[key])) for key in ("format_version", "reads") if key in about]
        print_table("\ncapabilities", ("name", "value"), rows)
    typer.echo(f"\nas a spec: {json.dumps(about['example'])}")


def _default(field: dict[str, Any]) -> str:
    return "required" if field["required"] else json.dumps(field["default"])


def _range(tunable: dict[str, Any] | None) -> str:
    if tunable is None:
        return ""
    if tunable["choices"]:
        return ", ".join(json.dumps(c) for c in tunable["choices"])
    return f"{tunable['low']:g} .. {tunable['high']:g}{' (log)' if tunable['log'] else ''}"
