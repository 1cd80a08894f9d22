"""Which chains can run: on this device, on these planes, on this model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvserve_core.artefacts import NONE, Artefacts
from kvserve_core.component import ComponentSpec, Kind
from kvserve_core.errors import KVServeError
from kvserve_core.profile import Chain, PipelineSpec
from kvserve_core.registry import Registry
from kvserve_core.spec import KVSpec, Plane, whole

USUAL: Mapping[Plane, frozenset[str]] = {"*": frozenset({"k", "v"})}
"""What ``*`` stands for while no model is known."""


@dataclass
class Fit:
    """Checks chains, each component and each kind of chain once. ``kv``: without it the model is not asked.

    A model is asked with one chain for each sequence of components and each layer block; what then fails in a
    measurement is an error there.
    """

    registry: Registry
    device: str = "cpu"
    kv: KVSpec | None = None
    artefacts: Artefacts = NONE
    _made: dict[tuple[Kind, str, str], Any] = field(default_factory=dict)
    _asked: dict[tuple[object, ...], str] = field(default_factory=dict)

    def stage(self, kind: Kind, spec: ComponentSpec) -> Any:
        """The component, or why there is none, as text."""
        key = (kind, spec.name, json.dumps(dict(spec.configuration), sort_keys=True, default=str))
        if key not in self._made:
            try:
                self._made[key] = self.registry.create(kind, spec)
            except KVServeError as error:
                self._made[key] = str(error)
        return self._made[key]

    def problem(self, plane: Plane, chain: Chain) -> str:
        """Why a chain cannot run on a plane; empty if nothing speaks against it."""
        stages: list[tuple[str, Any]] = [
            (f"transform {t.name!r}", self.stage("transform", t)) for t in chain.transforms
        ]
        stages.append((f"quantizer {chain.quantizer.name!r}", self.stage("quantizer", chain.quantizer)))
        stages.append((f"codec {chain.codec.name!r}", self.stage("codec", chain.codec)))
        if broken := next((stage for _, stage in stages if isinstance(stage, str)), ""):
            return broken
        found = [self._of_stage(name, stage.caps, plane) for name, stage in stages]
        return next(filter(None, [*found, _together([stage for _, stage in stages])]), "")

    def _of_stage(self, name: str, caps: Any, plane: Plane) -> str:
        if self.device not in caps.encode_on & caps.decode_on:
            return f"{name} does not run on {self.device!r}"
        missing = USUAL.get(plane, frozenset({plane})) - caps.planes
        return f"{name} does not take plane {min(missing)!r}" if missing and "*" not in caps.planes else ""

    def on_model(self, spec: PipelineSpec) -> str:
        """Why the model refuses a pipeline; empty without a model."""
        if self.kv is None:
            return ""
        key = (*((plane, _components(chain)) for plane, chain in sorted(spec.planes.items())), spec.layer_block)
        if key not in self._asked:
            self._asked[key] = self._ask(self.kv, spec)
        return self._asked[key]

    def _ask(self, kv: KVSpec, spec: PipelineSpec) -> str:
        import torch

        from kvserve_core.pipeline import Pipeline

        try:
            Pipeline.build(spec, kv, whole(kv), torch.device(self.device), self.registry, self.artefacts)
        except KVServeError as error:
            return str(error)
        return ""


def _components(chain: Chain) -> tuple[str, ...]:
    return (*(t.name for t in chain.transforms), chain.quantizer.name, chain.codec.name)


def _together(stages: list[Any]) -> str:
    """What speaks against these stages in a row."""
    *transforms, quantizer, codec = stages
    if quantizer.caps.exact and not all(t.caps.exact for t in transforms):
        return "an exact quantizer cannot follow a transform that is not exact"
    if quantizer.caps.max_alphabet > codec.caps.max_alphabet:
        return f"{quantizer.caps.max_alphabet} levels are more than the codec takes ({codec.caps.max_alphabet})"
    return ""
