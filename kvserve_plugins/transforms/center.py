"""Values without what all tokens of a segment share."""

from __future__ import annotations

from torch import Tensor

from kvserve_core.component import ANY, Capabilities, ComponentConfig
from kvserve_core.spec import Region
from kvserve_core.stages import Transform
from kvserve_core.tensor import Params
from kvserve_plugins.kernels.channels import means, stored
from kvserve_plugins.kernels.shapes import reduced, require_shape


class Center(Transform):
    """Subtracts the mean of each channel of a head over the segment.

    ``[L, H, T, D]`` to f32 of the same shape and the parameter ``mean`` ``[L, H, 1, D]`` in bf16; both sides use the
    rounded means. Keys gain most: their channels have large means, more so behind ``derope``. See SageAttention, arXiv
    2410.02367, section 4.2 (smoothing of K).
    """

    class Config(ComponentConfig):
        """Nothing to set."""

    config: Config
    caps = Capabilities(
        encode_on=frozenset({"cpu", "cuda"}),
        decode_on=frozenset({"cpu", "cuda"}),
        planes=ANY,
        head_local=True,
        layer_local=True,
    )

    def encode(self, x: Tensor, at: Region) -> tuple[Tensor, Params]:
        """``[L, H, T, D]`` to values around 0, f32, and their means."""
        wide = x.float().contiguous()
        mean = stored(means(wide))
        return wide - mean.float(), {"mean": mean}

    def decode(self, y: Tensor, params: Params, at: Region) -> Tensor:
        """``[L, H, T, D]`` in f32.

        Raises:
            FrameError: ``mean`` of another shape.
        """
        require_shape(params, ("mean",), reduced(y.shape, (2,)), at)
        return y + params["mean"].float()
