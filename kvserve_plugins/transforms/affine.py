"""Channels brought to one scale."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from kvserve_core.component import ANY, Capabilities, ComponentConfig, Tunable
from kvserve_core.spec import Region
from kvserve_core.stages import Transform
from kvserve_core.tensor import Params
from kvserve_plugins.kernels.channels import divisors, means, scales, stored
from kvserve_plugins.kernels.shapes import reduced, require_shape


class Affine(Transform):
    """Brings each channel of a head to one scale over the segment, and to mean 0 if asked.

    ``y = (x - shift) / scale`` in f32; parameters ``scale`` and, with ``shift``, ``shift`` ``[L, H, 1, D]`` in bf16, of
    which both sides use the rounded values. A quantizer with one step then spends the same bits on every channel, as
    it should where channels matter equally whatever their size. A channel of zeros has scale 1. See SmoothQuant, arXiv
    2211.10438, for scales per channel.
    """

    class Config(ComponentConfig):
        """scale: root of the mean square (std, when shifted) or largest magnitude. shift: subtract the mean first."""

        scale: Literal["std", "max"] = Tunable("std", choices=("std", "max"))
        shift: bool = Tunable(True, choices=(False, True))

    config: Config
    caps = Capabilities(
        encode_on=frozenset({"cpu", "cuda"}),
        decode_on=frozenset({"cpu", "cuda"}),
        planes=ANY,
        head_local=True,
        layer_local=True,
    )

    def encode(self, x: Tensor, at: Region) -> tuple[Tensor, Params]:
        """``[L, H, T, D]`` to normalised values, f32, and what it takes to undo that."""
        wide = x.float().contiguous()
        params = {}
        if self.config.shift:
            params["shift"] = stored(means(wide))
            wide = wide - params["shift"].float()
        params["scale"] = stored(scales(wide, self.config.scale))
        return wide / divisors(params["scale"]), params

    def decode(self, y: Tensor, params: Params, at: Region) -> Tensor:
        """``[L, H, T, D]`` in f32.

        Raises:
            FrameError: parameters of another shape.
        """
        names = ("scale", "shift") if self.config.shift else ("scale",)
        require_shape(params, names, reduced(y.shape, (2,)), at)
        x = y * divisors(params["scale"])
        return x + params["shift"].float() if self.config.shift else x
