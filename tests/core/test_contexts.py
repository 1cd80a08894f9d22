"""Which requests cannot be, and that the one to blame is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from controller_cases import GBPS, MIB, three
from kvserve_core.errors import ConfigError
from kvserve_core.policy import ServiceContext

NAN, INF, HUGE = float("nan"), float("inf"), 10**400
REFUSED: dict[str, list[Any]] = {
    "bandwidth": [0.0, -1.0, 1e-300, NAN, HUGE, "fast"],
    "nbytes": [-1, NAN, INF, HUGE, 10**5000, None, 2**62],
    "model_s": [-1.0, NAN, INF, HUGE, None],
    "slo_s": [NAN, HUGE, -INF, "2s"],
    "min_quality": [NAN, -0.1, 7, "high"],
    "intent": ["stroe", None],
    "active": [-1, NAN, "two"],
    "elapsed_s": [-1.0, NAN, INF, "1s"],
    "output_tokens": [-5, NAN, "many"],
    "slo_kind": ["bogus", None],
    "acceptable": [{"raw"}, ["raw"], "raw"],
    "workload": [None, 7],
    "link": [None, ["west"]],
}


@pytest.mark.parametrize(
    ("field", "value"),
    [pytest.param(f, v, id=f"{f}-{i}") for f, values in REFUSED.items() for i, v in enumerate(values)],
)
def test_a_figure_that_is_none_is_refused_by_name(field: str, value: Any) -> None:
    context = replace(ServiceContext(nbytes=MIB, bandwidth=GBPS), **{field: value})
    with pytest.raises(ConfigError) as caught:
        three().choose(context)
    assert caught.value.path == field


def test_no_limit_and_a_budget_that_is_spent_are_figures() -> None:
    context = ServiceContext(nbytes=MIB, bandwidth=GBPS, slo_s=INF)
    assert three().choose(context).reason == "fastest"
    assert "least violating" in three().choose(replace(context, slo_s=-1.0)).reason
    assert three().choose(replace(context, bandwidth=1e-3)).profile == "slow9"


def test_a_name_may_be_of_a_kind_of_text() -> None:
    class Name(str):
        pass

    asked = ServiceContext(nbytes=MIB, workload=Name("code"), bandwidth=GBPS)
    assert three().choose(asked).profile == three().choose(replace(asked, workload="code")).profile
