from __future__ import annotations

from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, ValidationError

from kvserve_core.component import (
    API_VERSION,
    KINDS,
    Capabilities,
    Component,
    ComponentConfig,
    ComponentSpec,
    Tunable,
    TunableSpec,
    config_error,
    tunables,
)
from kvserve_core.errors import ConfigError

NAMES = st.sampled_from(["levels", "axis", "seed"])
VALUES = st.one_of(st.booleans(), st.integers(-2, 2), st.floats(-2, 2), st.lists(st.integers(), max_size=2))


class Inner(ComponentConfig):
    depth: int = 1


class Config(ComponentConfig):
    levels: int = Tunable(16, low=2, high=256, log=True, ge=2, json_schema_extra={"unit": "levels"})
    axis: str = Tunable("token", choices=("token", "channel"))
    inner: Inner = Inner()
    mode: Literal["a", "b"] | tuple[int, ...] = "a"
    seed: int = 0


def error_of(value: dict[str, Any]) -> ConfigError:
    with pytest.raises(ValidationError) as caught:
        Config.model_validate(value)
    return config_error(caught.value, Config, value)


def test_a_bare_name_is_a_spec_without_configuration() -> None:
    assert ComponentSpec.model_validate("zstd") == ComponentSpec(name="zstd")
    assert ComponentSpec.model_validate({"name": "zstd", "configuration": {"level": 3}}).configuration == {"level": 3}


@pytest.mark.parametrize("value", ["", 3, {"configuration": {}}, {"name": "zstd", "level": 3}])
def test_a_spec_refuses_what_is_not_one(value: object) -> None:
    with pytest.raises(ValidationError):
        ComponentSpec.model_validate(value)


@given(st.dictionaries(NAMES, VALUES), st.dictionaries(NAMES, VALUES))
def test_equal_specs_hash_alike(one: dict[str, Any], other: dict[str, Any]) -> None:
    a, b = ComponentSpec(name="x", configuration=one), ComponentSpec(name="x", configuration=other)
    assert a != b or hash(a) == hash(b)
    turned = ComponentSpec(name="x", configuration=dict(reversed(one.items())))
    assert hash(turned) == hash(a)


def test_equal_numbers_of_different_types_hash_alike() -> None:
    one, true = (ComponentSpec(name="x", configuration={"n": n}) for n in (1, True))
    assert one == true
    assert len({one, true}) == 1


@given(st.dictionaries(NAMES, VALUES))
def test_a_spec_survives_json(configuration: dict[str, Any]) -> None:
    spec = ComponentSpec(name="x", configuration=configuration)
    assert ComponentSpec.model_validate_json(spec.model_dump_json()) == spec


def test_configs_are_frozen_and_refuse_unknown_fields() -> None:
    with pytest.raises(ValidationError):
        Config(levles=3)  # type: ignore[call-arg]  # wrong on purpose
    with pytest.raises(ValidationError):
        Config().levels = 3  # type: ignore[misc]  # wrong on purpose


def test_tunables_are_the_marked_fields_and_keep_other_schema_entries() -> None:
    assert tunables(Config) == {
        "levels": TunableSpec(low=2, high=256, log=True),
        "axis": TunableSpec(choices=("token", "channel")),
    }
    assert Config.model_json_schema()["properties"]["levels"]["unit"] == "levels"
    assert Config().levels == 16


@pytest.mark.parametrize(
    "given_range",
    [
        {},
        {"low": 1},
        {"high": 1},
        {"low": 2, "high": 2},
        {"low": 3, "high": 2},
        {"low": 0, "high": 2, "log": True},
        {"choices": (1,), "low": 0, "high": 2},
        {"choices": (1,), "low": 0},
    ],
)
def test_an_unusable_tunable_is_refused_where_it_is_written(given_range: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="a Tunable "):
        Tunable(1, **given_range)


def test_a_tunable_without_default_is_required() -> None:
    class Required(ComponentConfig):
        levels: int = Tunable(choices=(2, 4))

    with pytest.raises(ValidationError):
        Required()


@pytest.mark.parametrize(
    ("value", "path", "reason"),
    [
        (
            {"levles": 3},
            "levles",
            "unknown field 'levles'; did you mean 'levels'? allowed: axis, inner, levels, mode, seed",
        ),
        ({"inner": {"dept": 3}}, "inner.dept", "unknown field 'dept'; did you mean 'depth'? allowed: depth"),
        ({"levels": 1, "depth": 2}, "depth", "unknown field 'depth'; allowed: axis, inner, levels, mode, seed"),
        ({"levels": 1}, "levels", "Input should be greater than or equal to 2, got 1"),
        ({"inner": {"depth": "x"}}, "inner.depth", "unable to parse string as an integer, got 'x'"),
        ({"mode": (1, "x")}, "mode", "Input should be 'a' or 'b', got (1, 'x')"),
    ],
)
def test_the_first_error_has_the_path_of_its_field(value: dict[str, Any], path: str, reason: str) -> None:
    error = error_of(value)
    assert error.path == path
    assert error.reason.endswith(reason)


def test_a_missing_field_is_part_of_the_path_though_the_input_lacks_it() -> None:
    class Outer(BaseModel):
        model_config = ConfigDict(extra="forbid")
        inner: ComponentSpec

    with pytest.raises(ValidationError) as caught:
        Outer.model_validate({"inner": {}})
    error = config_error(caught.value, Outer, {"inner": {}})
    assert (error.path, error.reason) == ("inner.name", "Field required")


def test_defaults_are_the_cautious_answer() -> None:
    caps = Capabilities()
    assert not any((caps.exact, caps.head_local, caps.artefacts, caps.async_size))
    assert caps.encode_on == caps.decode_on == {"cpu"}
    assert Component("x", "m:X").api == API_VERSION
    assert KINDS == ("transform", "quantizer", "codec", "transport", "policy", "evaluator", "workload")
