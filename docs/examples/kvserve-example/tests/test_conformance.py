"""Both components pass the conformance kit that comes with kvserve."""

from __future__ import annotations

from pathlib import Path

from kvserve_example.sign import AXES, Sign
from torch import Tensor

from kvserve_core.testing import CodecTests, QuantizerTests

GOLDEN = Path(__file__).parent / "golden"


class TestSign(QuantizerTests):
    component = "example.sign"
    configurations = ({}, {"axis": "channel"})
    golden = GOLDEN

    def max_error(self, x: Tensor, config: Sign.Config) -> Tensor:
        axis = AXES[config.axis]
        mean = x.mean(axis, keepdim=True)
        distance = (x - mean).abs()
        spread = distance.mean(axis, keepdim=True)
        return distance + spread + 2**-7 * (mean.abs() + spread)  # the last term is bf16 rounding


class TestRunLength(CodecTests):
    component = "example.rle"
    golden = GOLDEN
