"""The component under test, and what a check says when it does not hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch
from pydantic import BaseModel
from torch import Tensor

from kvserve_core.artefacts import NONE, Artefacts
from kvserve_core.component import Capabilities, ComponentConfig, ComponentSpec, Kind, tunables
from kvserve_core.errors import EscapeSegment, FrameError
from kvserve_core.registry import Registry, default_registry
from kvserve_core.spec import KVSpec, Region
from kvserve_core.stages import Codec, Quantizer, Stage, Transform
from kvserve_core.testing.data import cell

MaxError: TypeAlias = Callable[[Tensor, Any], Tensor | float | None]
"""``(x in f32 [L, H, T, D], config)`` to the largest ``|x - x'|`` allowed, broadcast against x; None: no promise."""

Sample: TypeAlias = Callable[[Region, KVSpec], Tensor]
"""``[L, H, T, D]`` in the plane's dtype for a region of a model."""


class CheckFailed(AssertionError):
    """A component does not do what it must; the message says what and where."""


class Skipped(Exception):
    """A check that cannot run here; the message says why."""


def require(holds: object, message: str) -> None:
    """Fail the check unless ``holds``.

    Raises:
        CheckFailed: it does not.
    """
    if not holds:
        raise CheckFailed(message)


def no_promise(x: Tensor, config: Any) -> None:
    """The :data:`MaxError` of a component that promises nothing beyond finite values nearer to x than zeros are."""
    del x, config


@dataclass(frozen=True)
class Subject:
    """One component in one configuration.

    create: makes an instance. artefacts: calibrated files it may read. golden: the folder of its golden frames.

    Of a calibrated component, which works with one model: model, and plane, which it is for (sizes are then not
    varied), and sample, the values that it was calibrated on, as a function of region and model.
    """

    kind: Kind
    name: str
    create: Callable[[], Any]
    configuration: Mapping[str, Any] = field(default_factory=dict)
    registry: Registry | None = None
    artefacts: Artefacts = NONE
    max_error: MaxError = no_promise
    golden: Path | None = None
    model: KVSpec | None = None
    plane: str | None = None
    sample: Sample | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def of(
        cls,
        kind: Kind,
        name: str,
        configuration: Mapping[str, Any] | None = None,
        registry: Registry | None = None,
        **more: Any,
    ) -> Subject:
        """An installed component. ``configuration`` None is the default one, see :func:`default_configuration`."""
        known = registry or default_registry()
        given = default_configuration(known.load(kind, name).Config) if configuration is None else configuration
        spec = ComponentSpec(name=name, configuration=given)
        return cls(kind, name, lambda: known.create(kind, spec), given, known, **more)

    @property
    def spec(self) -> ComponentSpec:
        """As it stands in a pipeline."""
        return ComponentSpec(name=self.name, configuration=self.configuration)

    @cached_property
    def stage(self) -> Any:
        """One instance, for what it says of itself."""
        return self.create()

    @property
    def caps(self) -> Capabilities:
        """What this configuration can do; the cautious answer for kinds without capabilities."""
        caps = getattr(self.stage, "caps", None)
        return caps if isinstance(caps, Capabilities) else Capabilities()

    @property
    def config(self) -> ComponentConfig:
        """The validated configuration."""
        config: ComponentConfig = self.stage.config
        return config

    @property
    def unplaced(self) -> bool:
        """Whether it reads calibrated files and nobody said for which model they are."""
        return self.caps.artefacts and self.model is None

    def bound(self, kv: KVSpec, at: Region) -> Any:
        """A new instance bound to a place, as a pipeline binds it: to the whole token cell."""
        stage: Stage = self.create()
        return stage.bind(cell(at), kv, self.device, self.artefacts)

    def stage_is(self, base: type) -> bool:
        """Whether it is a transform, a quantizer, a codec."""
        return isinstance(self.stage, base)

    def obstacle(self) -> str | None:
        """Why this component cannot be checked here, or None."""
        if self.caps.artefacts and not self.artefacts.hashes:
            return "it reads calibrated files and none were given (fixture 'artefacts', or '--library')"
        for where, devices in (("encodes", self.caps.encode_on), ("decodes", self.caps.decode_on)):
            if isinstance(self.stage, Stage) and devices and self.device.type not in devices:
                return f"it {where} on {', '.join(sorted(devices))} only, the checks run on {self.device.type!r}"
        return None


def default_configuration(config: type[BaseModel]) -> dict[str, Any]:
    """A value for each field that has no default and is Tunable: its first choice, or the middle of its range."""
    found: dict[str, Any] = {}
    for name, spec in tunables(config).items():
        if config.model_fields[name].is_required():
            low, high = spec.low or 0.0, spec.high or 0.0
            middle = (low * high) ** 0.5 if spec.log else (low + high) / 2
            found[name] = spec.choices[0] if spec.choices else middle
    return found


def through(stage: Transform | Quantizer, x: Tensor, at: Region) -> Tensor:
    """``x`` encoded and decoded again."""
    if isinstance(stage, Transform):
        y, params = stage.encode(x, at)
        return stage.decode(y, params, at)
    return stage.decode(stage.encode(x, at), at)


def may_refuse(kind: str, subject: Subject) -> tuple[type[Exception], ...]:
    """What a lossy stage may raise on values that it is not made for: the pipeline then sends the segment raw."""
    strange = kind != "normal" if subject.sample else kind in ("large", "outlier")
    return (EscapeSegment,) if strange and not subject.caps.exact else ()


def decoded(codec: Codec, blobs: Any, like: Any) -> list[Tensor]:
    """``codec.decode``, with a device codec's flags turned into the error that a CPU codec raises.

    Raises:
        FrameError: the codec says that a blob does not decode.
    """
    found = list(codec.decode(blobs, like))
    if codec.ok is not None and not bool(codec.ok.all()):
        raise FrameError("the codec flags a blob as undecodable")
    return found
