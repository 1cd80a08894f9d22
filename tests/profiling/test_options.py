from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvserve_core.component import ComponentConfig, ComponentSpec, Tunable, TunableSpec
from kvserve_core.errors import ConfigError
from kvserve_core.profiling.options import STEPS, Names, agree, as_value, chain, component, grid, merged
from kvserve_core.profiling.options import Option as Opt


class Inner(ComponentConfig):
    levels: int = Tunable(16, choices=(4, 8))


class Outer(ComponentConfig):
    axis: str = Tunable("token", choices=("token", "group"))
    size: int = Tunable(32, choices=(16, 32), when={"axis": ("group",)})
    fixed: float = 1.0
    inner: ComponentSpec = ComponentSpec(name="inner")


CONFIGS: dict[str, Any] = {"inner": Inner, "outer": Outer}
NAMES = Names(lambda kind, name: CONFIGS[name], lambda name, about: f"{about} of {name}")


def options(name: str, **configuration: Any) -> list[Opt]:
    return component("quantizer", ComponentSpec(name=name, configuration=configuration), f"k.{name}", NAMES)


def test_a_range_is_cut_evenly_or_by_factors_and_whole_where_the_field_is() -> None:
    assert len(grid(TunableSpec(low=0.0, high=1.0))) == STEPS
    assert grid(TunableSpec(low=0.0, high=1.0))[::7] == (0.0, 1.0)
    powers = grid(TunableSpec(low=2, high=256, log=True), whole=True)
    assert powers == (2, 4, 8, 16, 32, 64, 128, 256)
    assert all(isinstance(v, int) for v in powers)
    assert grid(TunableSpec(low=1, high=3), whole=True) == (1, 2, 3)
    assert grid(TunableSpec(choices=("a", "b"))) == ("a", "b")


def test_what_is_not_written_is_searched_and_a_field_that_does_not_matter_is_not() -> None:
    found = options("outer")
    assert [o.values for o in found] == [
        (("k.outer.axis", "token"),),
        (("k.outer.axis", "group"), ("k.outer.size", 16)),
        (("k.outer.axis", "group"), ("k.outer.size", 32)),
    ]
    assert found[0].body == {"name": "outer", "configuration": {"axis": "token"}}


def test_what_is_written_is_kept_and_is_no_dimension() -> None:
    assert options("outer", axis="token", fixed=2.0) == [
        Opt({"name": "outer", "configuration": {"axis": "token", "fixed": 2.0}})
    ]


def test_values_to_try_replace_those_that_the_component_offers() -> None:
    found = options("inner", levels={"$try": [3, 5, 7]})
    assert [o.values for o in found] == [(("k.inner.levels", n),) for n in (3, 5, 7)]


def test_a_component_within_a_component_is_searched_too() -> None:
    found = options("outer", axis="token", inner={"name": "inner", "configuration": {}})
    assert [o.values for o in found] == [(("k.outer.inner.levels", n),) for n in (4, 8)]
    assert found[1].body["configuration"]["inner"] == {"name": "inner", "configuration": {"levels": 8}}


def test_an_artefact_is_looked_up() -> None:
    (found,) = options("outer", axis="token", fixed={"$artefact": "heads", "field": "per"})
    assert found.body["configuration"]["fixed"] == "per of heads"


def test_a_multiple_is_worked_out_when_the_chain_is_known() -> None:
    parts = [
        *options("outer", axis="token", fixed={"$of": "levels", "times": [0.5]}),
        *options("inner", levels=8),
        Opt({"name": "c", "configuration": {}}),
    ]
    made = chain(parts, (("k.codec", "c"),))
    assert made.body["transforms"][0]["configuration"]["fixed"] == 4.0
    assert made.values == (("k.codec", "c"),)


def test_several_multiples_are_a_dimension_of_factors() -> None:
    found = options("outer", axis="token", fixed={"$of": "levels", "times": [0.5, 0.25]})
    assert [o.values for o in found] == [(("k.outer.fixed", f),) for f in (0.5, 0.25)]


def test_a_multiple_of_nothing_says_what_there_is() -> None:
    parts = [
        *options("outer", axis="token", fixed={"$of": "level", "times": [1]}),
        *options("inner", levels=8),
        Opt({"name": "c", "configuration": {}}),
    ]
    with pytest.raises(ConfigError, match="unknown number of this chain 'level'; did you mean 'levels'"):
        chain(parts, ())


def test_wrong_patterns_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"k\.inner: unknown field of 'inner' 'level'; did you mean 'levels'"):
        options("inner", level=3)
    with pytest.raises(ConfigError, match=r"k\.inner\.levels: '\$try' needs a list of values"):
        options("inner", levels={"$try": []})
    for factor in ("a", None, float("nan")):
        with pytest.raises(ConfigError, match=r"k\.outer\.fixed: 'times' needs numbers"):
            options("outer", fixed={"$of": "levels", "times": [factor]})
    with pytest.raises(ConfigError, match=r"k\.outer\.inner\.level: unknown field 'level'"):
        options("outer", inner={"name": "inner", "level": 3})


@pytest.mark.parametrize(
    "odd",
    [
        TunableSpec(choices=(Path("a"), Path("b"))),
        TunableSpec(choices=(float("nan"), 1.0)),
        TunableSpec(low=1.0, high=float("inf")),
        TunableSpec(low=-1e308, high=1e308),
        TunableSpec(low=1e-300, high=1e300, log=True),
    ],
)
def test_what_cannot_be_written_down_is_refused(odd: TunableSpec) -> None:
    with pytest.raises(ConfigError, match=r"is no JSON value|cannot be cut"):
        grid(odd, whole=True)


class Many(ComponentConfig):
    a: int | None = Tunable(1, low=1, high=9)
    b: int = Tunable(1, low=1, high=9)
    c: int = Tunable(1, low=1, high=9)
    d: int = Tunable(1, low=1, high=9)
    e: int = Tunable(1, low=1, high=9)
    f: int = Tunable(1, low=1, high=9)


def test_more_configurations_than_can_be_listed_are_refused() -> None:
    names = Names(lambda kind, name: Many, lambda name, about: about)
    with pytest.raises(ConfigError, match=r"k\.many: 262144 combinations are too many to list"):
        component("quantizer", ComponentSpec(name="many"), "k.many", names)
    fewer = dict.fromkeys("bcdef", 1)
    found = component("quantizer", ComponentSpec(name="many", configuration=fewer), "k.many", names)
    assert [o.body["configuration"]["a"] for o in found] == [1, 2, 3, 4, 6, 7, 8, 9]


def test_planes_agree_or_not() -> None:
    a, b = Opt(0, (("codec", "rans"), ("k.x", 1))), Opt(0, (("codec", "zstd"),))
    assert agree([a, a])
    assert not agree([a, b])
    assert merged([a.values, a.values, (("v.x", 2),)]) == (("codec", "rans"), ("k.x", 1), ("v.x", 2))
    assert [as_value(v) for v in (True, 3, None, (1, 2))] == [True, 3, "null", "[1,2]"]
