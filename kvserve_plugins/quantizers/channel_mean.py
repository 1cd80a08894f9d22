"""The least that can be sent of a head."""

from __future__ import annotations

import torch
from torch import Tensor

from kvserve_core.component import ANY, Capabilities, ComponentConfig
from kvserve_core.errors import NonFiniteError
from kvserve_core.spec import Region
from kvserve_core.stages import Quantizer
from kvserve_core.tensor import Quantized
from kvserve_plugins.kernels.norms import BF16_MAX
from kvserve_plugins.kernels.shapes import reduced, require_shape, shape_of


class ChannelMean(Quantizer):
    """Replaces each channel of a head by its mean over the segment.

    No stream and one parameter, ``mean`` ``[L, H, 1, D]`` in bf16: level 0 of a mixed-precision head. The tokens stay,
    as a transfer layer cannot drop them.
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
        max_alphabet=1,
    )

    def encode(self, x: Tensor, at: Region) -> Quantized:
        """``[L, H, T, D]`` finite floats to their means.

        Raises:
            NonFiniteError: NaN or Inf, on a CPU.
        """
        mean = (x.to(torch.float32) * (1 / max(x.shape[2], 1))).sum(2, keepdim=True)  # a sum of x could overflow
        if x.device.type == "cpu" and not bool(mean.isfinite().all()):
            raise NonFiniteError("NaN or Inf reached the quantizer; send this segment raw")
        stored = mean.clamp_(-BF16_MAX, BF16_MAX).to(torch.bfloat16)
        return Quantized((), {"mean": stored}, shape_of(x))

    def decode(self, q: Quantized, at: Region) -> Tensor:
        """``[L, H, T, D]`` in f32: the mean for every token.

        Raises:
            FrameError: ``mean`` of another shape.
        """
        require_shape(q.params, ("mean",), reduced(q.shape, (2,)), at)
        return q.params["mean"].to(torch.float32).expand(q.shape)
