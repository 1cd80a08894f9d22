from __future__ import annotations

import sys

import numpy as np
import pytest

from kvserve_core.errors import UnavailableComponentError
from kvserve_core.profiling.gp import believe, sklearn

INPUTS = np.linspace(0, 1, 11)[:, None]
AT = [0, 3, 7, 10]


def test_it_is_sure_where_it_measured_and_not_between() -> None:
    quality = 1 - 0.2 * INPUTS[AT, 0]
    belief = believe(INPUTS, AT, quality, np.zeros(len(AT)), seed=0)
    np.testing.assert_allclose(belief.mean[AT], quality, atol=0.01)
    assert belief.std[5] > belief.std[7]
    assert belief.mean[5] == pytest.approx(0.9, abs=0.02)


def test_wide_intervals_make_it_less_sure_of_what_it_measured() -> None:
    quality = 1 - 0.2 * INPUTS[AT, 0]
    sure, unsure = (believe(INPUTS, AT, quality, np.full(len(AT), noise**2), seed=0) for noise in (0.001, 0.05))
    assert unsure.std[AT].min() > 2 * sure.std[AT].max()
    assert np.ptp(unsure.mean) < np.ptp(sure.mean)  # it holds more of what it saw for chance


def test_equal_observations_are_no_division_by_zero() -> None:
    belief = believe(INPUTS, AT, np.full(4, 0.9), np.zeros(4), seed=0)
    np.testing.assert_allclose(belief.mean, 0.9, atol=1e-5)
    assert (belief.std > 0).all()


def test_the_seed_decides() -> None:
    quality = np.array([1.0, 0.8, 0.95, 0.7])
    first, again = (believe(INPUTS, AT, quality, np.zeros(4), seed=3) for _ in range(2))
    assert first.mean.tolist() == again.mean.tolist()


def test_without_scikit_learn_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.gaussian_process", None)
    with pytest.raises(UnavailableComponentError, match=r"pip install 'kvserve\[profile\]'"):
        sklearn()
