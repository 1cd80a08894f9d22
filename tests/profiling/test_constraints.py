from __future__ import annotations

import pytest

from kvserve_core.errors import ConfigError
from kvserve_core.profiling.constraints import Constraint, ends_with

VALUES = (("k.mixhq.high.levels", 8), ("k.mixhq.low.levels", 6), ("codec", "zstd"))


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("high.levels >= low.levels", True),
        ("low.levels >= high.levels", False),
        ("k.mixhq.high.levels == low.levels", False),
        ("high.levels != low.levels", True),
        ("high.levels < absent", True),
    ],
)
def test_it_compares_by_the_ends_of_names(text: str, allowed: bool) -> None:
    assert Constraint.parse(text).allows(VALUES) is allowed


@pytest.mark.parametrize("text", ["high >= ", "a => b", "a >= b >= c"])
def test_text_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"f\.constraints: .* is no constraint; write 'name SIGN name'"):
        Constraint.parse(text, "f.constraints")


def test_what_cannot_be_compared_says_so() -> None:
    with pytest.raises(ConfigError, match="'zstd' and 6 cannot be compared"):
        Constraint.parse("codec > low.levels").allows(VALUES)


def test_a_part_of_a_word_is_no_end() -> None:
    assert ends_with("k.low.levels", "low.levels")
    assert not ends_with("k.slow.levels", "low.levels")
