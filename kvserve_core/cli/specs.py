"""Components as arguments of commands."""

from __future__ import annotations

from kvserve_core.component import ComponentSpec, Kind
from kvserve_core.errors import ConfigError
from kvserve_core.json_text import parsed


def component_spec(text: str, kind: Kind) -> ComponentSpec:
    """A name, or ``{"name": ..., "configuration": {...}}``.

    Raises:
        ConfigError: it is neither; its path is the kind.
    """
    try:
        return ComponentSpec.model_validate(parsed(text) if text.lstrip().startswith("{") else text)
    except ValueError as error:
        a = "an" if kind[0] in "aeiou" else "a"
        raise ConfigError(
            f"{text!r} is not {a} {kind}: it is neither a name nor a spec in JSON: {error}", kind
        ) from None


def label(spec: ComponentSpec) -> str:
    """For people: ``analytic (min_gain=0.02)``."""
    given = ", ".join(f"{name}={value}" for name, value in spec.configuration.items())
    return f"{spec.name} ({given})" if given else spec.name
