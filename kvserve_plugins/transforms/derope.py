"""Keys as they were before their positions were put in."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from kvserve_core.artefacts import Artefacts
from kvserve_core.component import ANY, Capabilities, ComponentConfig
from kvserve_core.errors import UnsupportedSpecError
from kvserve_core.spec import KVSpec, PlanePart, Region
from kvserve_core.stages import Transform
from kvserve_core.tensor import Params
from kvserve_plugins.kernels import rope


class Derope(Transform):
    """Undoes the rotary embedding of keys, which hides what their channels have in common.

    ``[L, H, T, D]`` to f32 of the same shape: each part of the plane that has a RopeSpec is turned back by its absolute
    positions and turned again on decoding (relative error about 1e-7), so in ``kv`` the values stay. Nothing is sent
    beside the values. See KVQuant, arXiv 2401.18079, section 3.2.
    """

    class Config(ComponentConfig):
        """Nothing to set: frequencies are those of the model."""

    config: Config
    caps = Capabilities(
        encode_on=frozenset({"cpu", "cuda"}),
        decode_on=frozenset({"cpu", "cuda"}),
        planes=ANY,
        head_local=True,
        layer_local=True,
    )

    _parts: tuple[PlanePart, ...]

    def bind(self, at: Region, spec: KVSpec, device: torch.device, artefacts: Artefacts) -> Self:
        """Find the parts to turn.

        Raises:
            UnsupportedSpecError: none has a rotary embedding that is a fixed rotation.
        """
        bound = super().bind(at, spec, device, artefacts)
        bound._parts = spec.group(at.group).plane(at.plane).parts
        if not rope.has_rope(bound._parts):
            raise UnsupportedSpecError(
                f"plane {at.plane!r} of group {at.group} has no part with a known rotary embedding (values, layers"
                " without positions, or a scaling that depends on the request); leave 'derope' out"
            )
        return bound

    def encode(self, x: Tensor, at: Region) -> tuple[Tensor, Params]:
        """``[L, H, T, D]`` to values without their embedding, f32."""
        return rope.undo(x, self._parts, at.start), {}

    def decode(self, y: Tensor, params: Params, at: Region) -> Tensor:
        """The embedding applied again, f32."""
        return rope.apply(y, self._parts, at.start)
