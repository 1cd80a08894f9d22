"""What a request may ask for."""

from __future__ import annotations

from typing import Any

import pytest

from kvserve_core.errors import ConfigError
from kvserve_core.requests import RequestOptions


def test_options_are_read_and_other_keys_left_alone() -> None:
    given = {"workload": "code", "slo": "200ms", "min_quality": 0.97, "transfer_id": "t"}
    assert RequestOptions.parse(given) == RequestOptions("code", 0.2, 0.97)
    assert RequestOptions.parse(None) == RequestOptions.parse({}) == RequestOptions()


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({"slo": "-1s"}, "slo"),
        ({"slo": "soon"}, "slo"),
        ({"min_quality": 1.5}, "min_quality"),
        ({"min_quality": float("nan")}, "min_quality"),
        ({"workload": ""}, "workload"),
        ({"slo_kind": "tpot"}, "slo_kind"),
    ],
)
def test_a_bad_value_is_named(given: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RequestOptions.parse(given)
    assert caught.value.path == path


def test_something_else_than_a_table_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be a table"):
        RequestOptions.parse(["slo"])  # type: ignore[arg-type]  # what a router may send
