"""From timings to a fixed cost and a cost per byte."""

from __future__ import annotations

import pytest

from kvserve_core.latency import Speed
from kvserve_core.overlap import SEQUENTIAL, Form
from kvserve_core.speed import Timing, fit, fitted, together


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


def test_small_requests_are_not_what_large_ones_leave_over() -> None:
    sizes, seconds = [1e6, 8e6, 32e6], [0.002, 0.006, 0.0256]  # the large one is a little slower than the line
    found = fit(sizes, seconds)
    assert [found.seconds(v) for v in sizes] == pytest.approx(seconds, rel=0.2)


def test_a_clock_that_saw_nothing_does_no_harm() -> None:
    assert fit([1e6, 2e6, 4e6], [0.0, 1e-9, 3e-9]).seconds(4e6) == pytest.approx(3e-9, rel=0.5)
    assert fit([1e6, 2e6], [0.0, 0.0]).seconds(1e9) == 0.0


@pytest.mark.parametrize("stages", [(0.004, 0.007), (0.007, 0.004), (0.005, 0.005), (0.0, 0.003)])
@pytest.mark.parametrize("form", [SEQUENTIAL, Form(2**20), Form(3e6), Form(1e9)])
def test_decoding_is_what_the_form_says_was_not_encoding(stages: tuple[float, float], form: Form) -> None:
    encode_s, decode_s = stages
    total_s = form.seconds(encode_s, 0.0, decode_s, 8e6)
    assert together(8_000_000, total_s, encode_s, form) == Timing(8_000_000, encode_s, pytest.approx(decode_s))


def test_a_total_that_is_less_than_its_part_is_noise() -> None:
    assert together(8_000_000, 0.003, 0.004, Form(2**20)).decode_s == 0.0
    assert together(8_000_000, 0.003, 0.004, SEQUENTIAL).decode_s == 0.0
