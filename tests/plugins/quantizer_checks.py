"""What the tests of quantizers share: one segment through a stage, and the demands that each makes of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvserve_core.errors import FrameError, NonFiniteError
from kvserve_core.spec import DType, Region
from kvserve_core.stages import Quantizer
from kvserve_core.tensor import Quantized
from plugins.stage_checks import bind, check_config, check_deterministic, check_quantizer, model, place, values


@dataclass(frozen=True)
class Coded:
    """A bound stage, what went in, and what came of it."""

    stage: Quantizer
    at: Region
    x: Tensor
    q: Quantized

    @property
    def back(self) -> Tensor:
        return self.stage.decode(self.q, self.at)


def coded(
    stage: Quantizer,
    kind: str = "normal",
    tokens: int = 17,
    dim: int = 64,
    change: Callable[[Tensor], None] | None = None,
) -> Coded:
    """``tokens`` bf16 tokens of the small model through ``stage``; ``change`` may put some values in before."""
    x, at = values(kind, DType.BF16, tokens, dim), place(tokens)
    if change is not None:
        change(x)
    bound = bind(stage, model(dim=dim), at)
    return Coded(bound, at, x, bound.encode(x, at))


def check_all(make: Callable[[], Quantizer], error: Callable[[Tensor, Quantized, Tensor], Tensor]) -> None:
    """The kit's checks of a quantizer within an error bound."""
    check_quantizer(make, error)
    check_deterministic(make)
    check_config(make())


def check_largest_floats(stage: Quantizer) -> Coded:
    """The largest bf16 values decode to finite ones."""

    def change(x: Tensor) -> None:
        x[:, :, ::2, ::3] = torch.finfo(torch.bfloat16).max

    made = coded(stage, change=change)
    assert made.back.isfinite().all()
    return made


def check_not_a_number(stage: Quantizer, bad: float) -> None:
    """A segment with one such value is left to go raw."""

    def change(x: Tensor) -> None:
        x[1, 1, 1, 1] = bad

    with pytest.raises(NonFiniteError, match="raw"):
        coded(stage, change=change)


def check_parameter(stage: Quantizer, name: str) -> None:
    """A parameter of another shape, which could broadcast to any size, is refused."""
    made = coded(stage)
    for wrong in (made.q.params[name][:1], made.q.params[name][..., None]):
        with pytest.raises(FrameError, match=f"'{name}'"):
            made.stage.decode(Quantized(made.q.parts, {name: wrong}, made.q.shape), made.at)
