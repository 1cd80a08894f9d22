"""From timings to a fixed cost and a cost per byte."""

from __future__ import annotations

import pytest

from kvserve_core.latency import Speed
from kvserve_core.speed import Timing, fit, fitted


def test_a_line_is_found() -> None:
    found = fit([1e6, 4e6, 9e6], [0.003, 0.006, 0.011])
    assert (found.fixed_s, found.s_per_byte) == (pytest.approx(0.002), pytest.approx(1e-9))


@pytest.mark.parametrize("seconds", [[0.001, 0.008], [0.004, 0.003], [0.003, 0.003]])
def test_noise_does_not_promise_time_below_zero_or_bytes_for_nothing(seconds: list[float]) -> None:
    found = fit([1e6, 4e6], seconds)
    assert found.fixed_s == 0.0
    assert found.s_per_byte == pytest.approx((seconds[0] + 4 * seconds[1]) / 17e6)
    assert found.seconds(1e12) > 500


def test_medians_of_equal_sizes_count() -> None:
    rows = [(10, 1.0, 2.0), (10, 9.0, 2.0), (10, 1.1, 7.0), (20, 2.1, 4.0)]
    encode, decode = fitted(Timing(*row) for row in rows)
    assert encode == Speed(pytest.approx(0.1), pytest.approx(0.1))
    assert decode.seconds(20) == pytest.approx(4.0)
