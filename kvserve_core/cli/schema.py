"""``kvserve schema``: what may be written in a pipeline, given the components that are installed."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from pydantic import BaseModel

from kvserve_core.cli.output import kind_of, print_json
from kvserve_core.component import KINDS, Kind
from kvserve_core.errors import UnavailableComponentError
from kvserve_core.profile import PipelineSpec
from kvserve_core.registry import Registry, default_registry

OfKind = Annotated[str | None, typer.Argument(help=f"One of: {', '.join(KINDS)}; the whole pipeline without it.")]
STAGES: tuple[Kind, ...] = ("transform", "quantizer", "codec")


def schema(kind: OfKind = None) -> None:
    """Print the JSON schema of a pipeline of installed components."""
    registry = default_registry()
    print_json(kind_schema(registry, kind_of(kind)) if kind else pipeline_schema(registry))


def pipeline_schema(registry: Registry) -> dict[str, Any]:
    """The schema of :class:`PipelineSpec` in which each slot takes the installed components of its kind only."""
    whole = PipelineSpec.model_json_schema()
    definitions: dict[str, Any] = whole["$defs"]
    slots = definitions["Chain"]["properties"]
    slots["transforms"]["items"] = {"$ref": "#/$defs/transform"}
    for kind in ("quantizer", "codec"):
        kept = {key: slots[kind][key] for key in ("default",) if key in slots[kind]}
        slots[kind] = {"$ref": f"#/$defs/{kind}", **kept}
    for kind in STAGES:
        part = kind_schema(registry, kind)
        definitions |= part.pop("$defs")
        definitions[kind] = part
    definitions.pop("ComponentSpec", None)
    return whole


def kind_schema(registry: Registry, kind: Kind) -> dict[str, Any]:
    """One of the installed components of a kind: a bare name, or an object told apart by its ``name``."""
    definitions: dict[str, Any] = {}
    bare, options = [], []
    for name in registry.names(kind):
        try:
            config = registry.load(kind, name).Config
        except UnavailableComponentError:  # what cannot be used here cannot be written here
            continue
        options.append(_option(kind, name, config, definitions))
        if not any(field.is_required() for field in config.model_fields.values()):
            bare.append(name)
    return {"oneOf": [{"enum": bare}, *options], "$defs": definitions}


def _option(kind: Kind, name: str, config: type[BaseModel], definitions: dict[str, Any]) -> dict[str, Any]:
    key = f"{kind}.{name}"
    own = config.model_json_schema(ref_template=f"#/$defs/{key}.{{model}}")
    definitions |= {f"{key}.{inner}": value for inner, value in own.pop("$defs", {}).items()}
    definitions[key] = own
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "configuration": {"$ref": f"#/$defs/{key}"}},
        "required": ["name", "configuration"] if own.get("required") else ["name"],
        "additionalProperties": False,
    }
