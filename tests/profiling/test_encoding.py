from __future__ import annotations

import numpy as np

from kvserve_core.profiling.encoding import ABSENT, APART, one_hot_min_max, ordinal, scaled
from kvserve_core.profiling.point import Point, Values
from profiling_cases import pool

SPEC = pool()[0].spec


def encoded(*rows: Values) -> np.ndarray:
    return one_hot_min_max([Point(values, SPEC) for values in rows])


def test_numbers_lie_on_the_unit_interval_and_choices_apart() -> None:
    found = encoded((("m", "a"), ("n", 4)), (("m", "b"), ("n", 8)), (("m", "a"), ("n", 6)))
    assert found.tolist() == [[APART, 0.0, 0.0], [0.0, APART, 1.0], [APART, 0.0, 0.5]]
    choices = found[:, :2]
    assert np.linalg.norm(choices[0] - choices[1]) == 1.0  # as far as the ends of a number


def test_what_a_candidate_does_not_have_is_in_the_middle_and_no_choice() -> None:
    found = encoded((("n", 4), ("m", "a")), (("n", 8), ("m", "b")), ())
    assert found[2].tolist() == [ABSENT, 0.0, 0.0]


def test_wide_numbers_are_compared_by_factors() -> None:
    np.testing.assert_allclose(scaled(np.array([0.01, 0.1, 1.0])), [0, 0.5, 1])
    np.testing.assert_allclose(scaled(np.array([1.0, 2.0, 3.0])), [0, 0.5, 1])
    np.testing.assert_allclose(scaled(np.array([0.0, 100.0, 50.0])), [0, 1, 0.5])
    assert scaled(np.array([3.0, 3.0])).tolist() == [0.0, 0.0]


def test_truth_is_a_choice_and_what_never_differs_has_no_column() -> None:
    assert encoded((("t", True), ("c", 3), ("s", "x")), (("t", False), ("c", 3), ("s", "x"))).tolist() == [
        [APART, 0.0],
        [0.0, APART],
    ]


def test_a_dimension_of_numbers_and_words_is_a_choice() -> None:
    assert encoded((("level", 1),), (("level", "null"),), (("level", 15),)).shape == (3, 3)


def test_nothing_to_tell_apart_gives_no_column() -> None:
    assert encoded((), ()).shape == (2, 0)


def test_the_plain_encoding_numbers_choices_and_scales_nothing() -> None:
    points = [Point((("m", m), ("n", n)), SPEC) for m, n in (("a", 4), ("b", 8), ("a", 6))]
    assert ordinal(points).tolist() == [[0, 4], [1, 8], [0, 6]]
