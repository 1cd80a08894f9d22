from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from kvserve_core.errors import ConfigError
from kvserve_core.units import (
    Bandwidth,
    Duration,
    Size,
    format_bandwidth,
    format_bytes,
    format_duration,
    parse_bandwidth,
    parse_bytes,
    parse_duration,
)

POSITIVE = st.floats(1e-9, 1e18)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("25Gbps", 25e9 / 8),
        ("100 Mbps", 12.5e6),
        ("8bps", 1.0),
        ("1kbps", 125.0),
        ("1Gbit/s", 125e6),
        ("300GB/s", 300e9),
        ("1MiB/s", 2.0**20),
        ("0.5 GB/s", 0.5e9),
        (".5GB/s", 0.5e9),
        ("1e3B/s", 1000.0),
        ("2.B/s", 2.0),
        ("0", 0.0),
        (12, 12.0),
        (0, 0.0),
    ],
)
def test_bandwidth_is_bits_with_bps_and_bytes_with_b_per_s(text: object, bytes_per_s: float) -> None:
    assert parse_bandwidth(text) == pytest.approx(bytes_per_s)
    assert isinstance(parse_bandwidth(text), float)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("56MiB", 56 * 2**20), ("4GB", 4_000_000_000), ("17", 17), ("1kB", 1000), (2**60 + 1, 2**60 + 1), ("0.5KiB", 512)],
)
def test_sizes_are_whole_bytes(text: object, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes
    assert isinstance(parse_bytes(text), int)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("200ms", 0.2), ("2s", 2.0), (3, 3.0), ("0", 0.0), ("5us", 5e-6), ("2min", 120.0), ("1h", 3600.0)],
)
def test_durations_are_seconds(text: object, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "fast", "25 Gb ps", "25gbps", "-1Gbps", "1,5Gbps", "nan", "inf", "1e", "..5", None, True, [], "٣Gbps"]
)
def test_what_has_no_known_unit_is_refused_with_an_example(text: object) -> None:
    with pytest.raises(ConfigError, match="is not understood; write for example '25Gbps' or '300GB/s'"):
        parse_bandwidth(text)


@pytest.mark.parametrize("text", ["20", "1e9", ".5", " 2. "])
def test_bandwidths_and_durations_in_text_need_a_unit(text: str) -> None:
    with pytest.raises(ConfigError, match=r"bandwidth '.*' has no unit; write for example '25Gbps' or '300GB/s'"):
        parse_bandwidth(text)
    with pytest.raises(ConfigError, match=r"duration '.*' has no unit; write for example '200ms' or '2s'"):
        parse_duration(text)
    assert parse_bytes(text) == int(float(text))


@pytest.mark.parametrize("number", [-1, -0.5, float("nan"), float("inf"), 10**400, "1e400"])
def test_numbers_must_be_finite_and_not_negative(number: object) -> None:
    for parse in (parse_bandwidth, parse_bytes, parse_duration):
        with pytest.raises(ConfigError, match="must be a finite number of at least 0"):
            parse(number)


def test_a_long_text_is_refused_without_backtracking() -> None:
    with pytest.raises(ConfigError, match="not understood"):
        parse_bytes("1" * 50_000 + "!")


@pytest.mark.parametrize(
    ("bytes_per_s", "text"),
    [(2.5e6, "20 Mbps"), (None, "unlimited"), (float("inf"), "unlimited"), (125e6, "1 Gbps"), (0.0, "0 bps")],
)
def test_bandwidth_is_shown_in_bits(bytes_per_s: float | None, text: str) -> None:
    assert format_bandwidth(bytes_per_s) == text


def test_sizes_and_durations_are_shown_in_the_largest_fitting_unit() -> None:
    assert format_bytes(58_720_256) == "56 MiB"
    assert format_bytes(0) == "0 B"
    assert format_duration(0.0021) == "2.1 ms"
    assert format_duration(90) == "90 s"


@given(POSITIVE)
def test_what_is_shown_can_be_read_again(value: float) -> None:
    if 1 <= value < 1e15:
        assert parse_bandwidth(format_bandwidth(value).replace("e+", "e")) == pytest.approx(value, rel=1e-3)
    if value < 1e6:
        assert parse_duration(format_duration(value)) == pytest.approx(value, rel=1e-3)


class Fields(BaseModel):
    rate: Bandwidth = 1.0
    size: Size = 1
    time: Duration = 1.0


def test_fields_take_text_with_units_and_keep_their_path_in_errors() -> None:
    assert Fields.model_validate({"rate": "8Mbps", "size": "1KiB", "time": "5ms"}) == Fields(
        rate=1e6, size=1024, time=0.005
    )
    with pytest.raises(ValidationError) as caught:
        Fields.model_validate({"time": "5 parsecs"})
    (error,) = caught.value.errors()
    assert error["loc"] == ("time",)
    assert "duration '5 parsecs' is not understood" in error["msg"]
