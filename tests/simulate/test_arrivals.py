"""The requests of a run: drawn before it, the same for every policy."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from numpy.random import default_rng

from kvserve_core.errors import ConfigError
from kvserve_core.simulate.arrivals import Requests, draw
from kvserve_core.simulate.scenario import Scenario


def drawn(seed: int = 1, **fields: object) -> Requests:
    return draw(Scenario.model_validate({"requests": 4000, **fields}), default_rng(seed))


def test_a_seed_gives_the_same_requests_again() -> None:
    first, second, other = drawn(), drawn(), drawn(seed=2)
    for column in (f.name for f in fields(Requests)):
        assert getattr(first, column) == getattr(second, column)
    assert first.arrival != other.arrival


def test_rate_and_shares() -> None:
    tenants = [{"name": "a", "share": 3, "tokens": {"sigma": 0}}, {"name": "b", "output_tokens": 7}]
    found = drawn(rate=50, tenants=tenants)
    assert found.arrival[0] == 0
    assert len(found) / found.arrival[-1] == pytest.approx(50, rel=0.06)
    tenant = np.asarray(found.tenant)
    assert (tenant == 0).mean() == pytest.approx(0.75, abs=0.03)
    assert set(np.asarray(found.output_tokens)[tenant == 1]) == {7}
    assert set(np.asarray(found.nbytes)[tenant == 0]) == {4096 * 57344}


def test_even_spacing() -> None:
    assert drawn(requests=3, every=0.5).arrival.tolist() == [0, 0.5, 1]


def test_lengths_are_clipped() -> None:
    tokens = {"median": 100, "sigma": 2, "low": 50, "high": 200}
    sizes = np.asarray(drawn(tenants=[{"tokens": tokens}]).nbytes) / 57344
    assert (sizes.min(), sizes.max()) == (50, 200)


@pytest.mark.parametrize("workers", [1, 3])
def test_prefill_is_first_come_first_served(workers: int) -> None:
    found = drawn(requests=500, rate=20, engine={"prefill_workers": workers})
    starts, ends = np.asarray(found.start), np.asarray(found.start) + np.asarray(found.prefill_s)
    assert (np.diff(starts) >= 0).all()
    assert (starts >= np.asarray(found.arrival)).all()
    for i, start in enumerate(starts):
        busy = int(((starts[:i] <= start) & (ends[:i] > start)).sum())
        assert busy < workers
        if start > found.arrival[i]:  # it waited, so all were busy until then
            assert ((starts[:i] < start) & (ends[:i] >= start)).sum() >= workers


def test_without_workers_nobody_waits() -> None:
    found = drawn(rate=1000, engine={"prefill_workers": 0})
    assert found.start == found.arrival


def test_noise_has_mean_one_and_can_be_off() -> None:
    assert np.mean(drawn(speeds={"noise": 0.3}).encode_noise) == pytest.approx(1, abs=0.03)
    quiet = drawn(speeds={"noise": 0, "ratio_noise": 0}, engine={"prefill_noise": 0})
    assert set(quiet.encode_noise) == set(quiet.ratio_noise) == {1.0}
    assert quiet.prefill_s == quiet.model_s
    assert quiet.arrival == drawn().arrival  # what is drawn does not depend on how much it counts


def test_arrivals_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("time_s,tokens,tenant,output_tokens\n2,10,b,\n1,20,a,5\n9,9,a,9\n")
    tenants = [{"name": "a"}, {"name": "b", "output_tokens": 3}]
    found = drawn(requests=2, arrivals=path, tenants=tenants)
    assert found.arrival.tolist() == [1, 2]
    assert found.tenant.tolist() == [0, 1]
    assert found.nbytes.tolist() == [20 * 57344, 10 * 57344]
    assert found.output_tokens.tolist() == [5, 3]


def test_all_of_a_file_is_played_unless_a_number_is_given(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("time_s,tokens\n" + "".join(f"{i},5\n" for i in range(10_001)))
    assert len(drawn(requests=None, arrivals=path)) == 10_001
    assert len(drawn(requests=7, arrivals=path)) == 7


def test_without_a_file_or_a_number_there_are_ten_thousand() -> None:
    assert len(drawn(requests=None)) == 10_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time_s,tokens\n", "has no rows"),
        ("time_s\n1\n", "line 2: needs numbers in 'time_s' and 'tokens'"),
        ("time_s,tokens\n1,many\n", "line 2: needs numbers"),
        ("time_s,tokens\n-1,5\n", "line 2: time_s must be from 0 to"),
        ("time_s,tokens,tenant\n1,5,defualt\n", "line 2: .*defualt.*default"),
    ],
)
def test_what_is_wrong_with_a_file(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        drawn(arrivals=path)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"no\.csv: cannot be read"):
        drawn(arrivals="no.csv")
