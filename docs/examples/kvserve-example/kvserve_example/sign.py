"""One-bit quantization."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvserve_core import Capabilities, ComponentConfig, Part, Quantized, Quantizer, Region, Tunable
from kvserve_core.errors import FrameError, NonFiniteError

AXES = {"token": 3, "channel": 2}


class Sign(Quantizer):
    """One bit a value: above or below the mean of its head and token, or channel.

    ``x' = mean + spread`` where ``x >= mean``, else ``mean - spread``; spread is the mean of ``|x - mean|``. Both are
    stored in bf16, and the codes are made with the stored mean, so that both sides agree. One stream in the order
    L, H, T, D, and the parameters ``mean`` and ``spread``: ``[L, H, T, 1]`` for a token, ``[L, H, 1, D]`` for a
    channel. After XNOR-Net, arXiv 1603.05279, section 3.1.
    """

    class Config(ComponentConfig):
        """axis: what shares a mean and a spread."""

        axis: Literal["token", "channel"] = Tunable("token", choices=("token", "channel"))

    config: Config
    caps = Capabilities(
        planes=frozenset({"k", "v", "kv"}),
        head_local=True,
        layer_local=True,
        max_alphabet=2,
    )

    def encode(self, x: Tensor, at: Region) -> Quantized:
        """``[L, H, T, D]`` to one bit a value.

        Raises:
            NonFiniteError: NaN or Inf, or a mean that overflows; the segment is then sent raw.
        """
        layers, heads, tokens, dim = x.shape
        values, axis = x.float(), AXES[self.config.axis]
        mean = _mean(values, axis)
        centred = values - mean.float()
        spread = _mean(centred.abs(), axis)
        if not bool(mean.isfinite().all() & spread.isfinite().all()):
            raise NonFiniteError("NaN or Inf reached quantizer 'example.sign'; send this segment raw")
        codes = (centred >= 0).to(torch.uint8).reshape(-1)
        part = Part(codes, alphabet=2, rows=layers * heads)
        return Quantized((part,), {"mean": mean, "spread": spread}, (layers, heads, tokens, dim))

    def decode(self, q: Quantized, at: Region) -> Tensor:
        """``[L, H, T, D]`` in f32.

        Raises:
            FrameError: parameters of another shape: a sender may be broken, and shapes broadcast.
        """
        due = [1 if i == AXES[self.config.axis] else n for i, n in enumerate(q.shape)]
        mean, spread = q.params["mean"], q.params["spread"]
        if [list(mean.shape), list(spread.shape)] != [due, due]:
            raise FrameError(f"'mean' {list(mean.shape)} and 'spread' {list(spread.shape)} must be {due}", at)
        above = q.parts[0].codes.view(q.shape) > 0
        return mean.float() + torch.where(above, spread.float(), -spread.float())


def _mean(x: Tensor, axis: int) -> Tensor:
    """In bf16, with ``axis`` reduced to 1; 0 where there is nothing."""
    return (x.sum(axis, keepdim=True) / max(x.shape[axis], 1)).bfloat16()
