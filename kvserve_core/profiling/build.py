"""From families and what is installed to a space."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from kvserve_core.artefacts import NONE, Artefacts
from kvserve_core.component import ComponentSpec, Kind
from kvserve_core.errors import ArtefactError, ConfigError, UnavailableComponentError
from kvserve_core.profile import Chain, PipelineSpec
from kvserve_core.profiling.calibrated import Calibrated
from kvserve_core.profiling.constraints import Constraint, ends_with
from kvserve_core.profiling.families import OTHERS, Family, Slots, SpaceConfig, named, shipped
from kvserve_core.profiling.fit import Fit
from kvserve_core.profiling.options import Names, Option, chain, component, merged, require_few
from kvserve_core.profiling.point import Values
from kvserve_core.profiling.space import FamilySpace, Space, blocks, common
from kvserve_core.registry import Registry, default_registry
from kvserve_core.spec import KVSpec


def build_space(
    config: SpaceConfig | None = None,
    *,
    registry: Registry | None = None,
    device: str = "cpu",
    kv: KVSpec | None = None,
    calibrated: Sequence[Calibrated] = (),
    artefacts: Artefacts = NONE,
) -> Space:
    """Everything that can run here. ``kv``: leave out what this model refuses; ``artefacts`` holds the files for that.

    Raises:
        ConfigError: a family names a component that is not known, or a field that it does not have.
    """
    config = config or shipped()
    registry = registry or default_registry()
    builder = _Builder(config, Fit(registry, device, kv, artefacts), {c.name: c for c in calibrated})
    made, left_out = [], {}
    for family in builder.expanded():
        try:
            space = builder.family(family)
        except (ArtefactError, UnavailableComponentError) as error:
            left_out[family.name] = str(error)
            continue
        if space.size:
            made.append(space)
        else:
            left_out[family.name] = _main_reason(space.dropped)
    return Space(config, tuple(made), left_out)


def _main_reason(dropped: Mapping[str, int]) -> str:
    return max(dropped, key=lambda why: dropped[why]) if dropped else "nothing is installed for one of its slots"


@dataclass
class _Builder:
    config: SpaceConfig
    fit: Fit
    calibrated: dict[str, Calibrated]
    _named: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self._named = named(self.config)

    def expanded(self) -> Iterator[Family]:
        """Families; one that wants calibrated files, once for each that there is."""
        for family in self.config.wanted:
            files = [c for name, c in sorted(self.calibrated.items()) if name.startswith(family.artefact)]
            if not family.artefact or not files:
                yield family
                continue
            for file in files:
                rest = file.name.removeprefix(family.artefact).strip("-_.")
                name = family.name if len(files) == 1 else f"{family.name}-{rest}"
                block = family.layer_block if file.layer_block is None else (file.layer_block,)
                yield family.model_copy(update={"name": name, "artefact": file.name, "layer_block": block})

    def family(self, family: Family) -> FamilySpace:
        dropped: Counter[str] = Counter()
        names = Names(self._config, lambda name, about: self._known(family.artefact if name == "*" else name, about))
        planes = {
            plane: [_renamed(o, plane, family.same) for o in self._chains(plane, slots, family, names, dropped)]
            for plane, slots in family.planes.items()
        }
        beside = (
            common("layer_block", family.layer_block),
            common("sink_tokens", family.sink_tokens),
            common("raw_layers", family.raw_layers),
        )
        made = FamilySpace(family.name, tuple(planes), blocks(list(planes.values()), beside), dropped)
        return self._on_model(made, dropped)

    def _on_model(self, made: FamilySpace, dropped: Counter[str]) -> FamilySpace:
        """Without the chains that the model refuses."""
        if self.fit.kv is None:
            return made
        kept = []
        for block in made.blocks:
            factors = list(block.factors)
            for i, plane in enumerate(made.planes):
                factors[i] = tuple(o for o in factors[i] if not self._refused(plane, o, factors[-3], dropped))
            kept.append(type(block)(tuple(factors)))
        return FamilySpace(made.name, made.planes, tuple(kept), dropped)

    def _refused(self, plane: str, option: Option, layer_blocks: Sequence[Option], dropped: Counter[str]) -> bool:
        for layers in layer_blocks:
            problem = self.fit.on_model(PipelineSpec(planes={plane: option.body}, layer_block=layers.body))
            if problem:
                dropped[problem] += 1
                return True
        return False

    def _config(self, kind: Kind, name: str) -> Any:
        return self.fit.registry.load(kind, name).Config

    def _known(self, name: str, about: str) -> Any:
        if name not in self.calibrated:
            held = ", ".join(sorted(self.calibrated)) or "none"
            raise ArtefactError(
                f"needs a calibrated file {name!r}; there are: {held}; make it with 'kvserve calibrate'"
            )
        file = self.calibrated[name]
        if about != "digest" and about not in file.about:
            raise ArtefactError(f"{about!r} of the calibrated file {name!r} is not known; calibrate it again")
        return file.digest if about == "digest" else file.about[about]

    def _chains(
        self, plane: str, slots: Slots, family: Family, names: Names, dropped: Counter[str]
    ) -> Iterator[Option]:
        rules = [Constraint.parse(text, f"{family.name}.constraints") for text in family.constraints]
        for transforms in self._sequences(slots.transforms, dropped):
            for quantizer in self._slot("quantizer", slots.quantizer, dropped):
                for codec in self._slot("codec", slots.codec, dropped):
                    at = _where(plane, transforms, quantizer, codec)
                    try:
                        ways = _ways(plane, transforms, quantizer, codec, names)
                    except UnavailableComponentError as error:
                        dropped[str(error)] += 1
                        continue
                    require_few(ways, f"{family.name}.{plane}")
                    for parts in product(*ways):
                        made = chain(parts, at)
                        if all(rule.allows(made.values) for rule in rules):
                            yield from self._checked(plane, made, dropped)

    def _checked(self, plane: str, made: Option, dropped: Counter[str]) -> Iterator[Option]:
        spec = Chain.model_validate(made.body)
        if problem := self.fit.problem(plane, spec):
            dropped[problem] += 1
        else:
            yield Option(spec, made.values)

    def _sequences(
        self, alternatives: Sequence[Sequence[ComponentSpec]], dropped: Counter[str]
    ) -> Iterator[tuple[ComponentSpec, ...]]:
        for alternative in alternatives:
            yield from product(*(self._slot("transform", (spec,), dropped) for spec in alternative))

    def _slot(self, kind: Kind, patterns: Sequence[ComponentSpec], dropped: Counter[str]) -> list[ComponentSpec]:
        """The components of a slot, with ``*`` spelt out and without those that are to be left out."""
        found: list[ComponentSpec] = []
        for pattern in patterns:
            found += self._others(kind, dropped) if pattern.name == OTHERS else [pattern]
        return [spec for spec in found if spec.name not in self.config.without]

    def _others(self, kind: Kind, dropped: Counter[str]) -> list[ComponentSpec]:
        """What is installed, can be made without being told anything, and is named nowhere."""
        found = []
        for name in self.fit.registry.names(kind):
            if name in self._named:
                continue
            spec = ComponentSpec(name=name)
            if problem := self._unfit(kind, spec):
                dropped[problem] += 1
            else:
                found.append(spec)
        return found

    def _unfit(self, kind: Kind, spec: ComponentSpec) -> str:
        """Why a component that no family names cannot be searched; empty if nothing speaks against it."""
        if isinstance(problem := self.fit.stage(kind, spec), str):
            return problem
        try:
            component(kind, spec, spec.name, Names(self._config, self._known))
        except ConfigError as error:
            return str(error)
        return ""


def _where(plane: str, transforms: Sequence[ComponentSpec], quantizer: ComponentSpec, codec: ComponentSpec) -> Values:
    row = "+".join(t.name for t in transforms) or "none"
    return ((f"{plane}.transforms", row), (f"{plane}.quantizer", quantizer.name), (f"{plane}.codec", codec.name))


def _ways(
    plane: str, transforms: Sequence[ComponentSpec], quantizer: ComponentSpec, codec: ComponentSpec, names: Names
) -> list[list[Option]]:
    slots: list[tuple[Kind, ComponentSpec]] = [("transform", t) for t in transforms]
    slots += [("quantizer", quantizer), ("codec", codec)]
    return [component(kind, spec, f"{plane}.{spec.name}", names) for kind, spec in slots]


def _renamed(option: Option, plane: str, same: Sequence[str]) -> Option:
    """What planes share loses the plane's name, so that it is one dimension."""

    def rename(name: str) -> str:
        bare = name.removeprefix(f"{plane}.")
        return bare if any(ends_with(name, each) for each in same) else name

    return Option(option.body, merged([tuple((rename(n), v) for n, v in option.values)]))
