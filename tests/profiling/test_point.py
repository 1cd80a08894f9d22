from __future__ import annotations

import pickle

import msgspec

from kvserve_core.latency import Speed
from kvserve_core.profile import PipelineSpec
from kvserve_core.profiling.point import KEY_DIGITS, Measurement, Point, spec_key
from profiling_cases import measurement, pool


def test_equal_pipelines_have_equal_keys_however_they_were_found() -> None:
    a = pool()[0]
    again = PipelineSpec.model_validate_json(a.spec.model_dump_json())
    assert Point((), again).key == a.key == spec_key(a.spec)
    assert len(a.key) == KEY_DIGITS
    assert len({p.key for p in pool()}) == len(pool())


def test_a_point_goes_to_another_process() -> None:
    a = pool()[0]
    back = pickle.loads(pickle.dumps(a))
    assert (back, back.key, back.at) == (a, a.key, {"family": "token", "levels": 4})


def test_a_measurement_is_kept_to_the_last_digit() -> None:
    m = measurement(pool()[0], encode=Speed(1e-3, 1 / 3e9), metrics={"continuation.kl": (0.1, 0.05, 1 / 7)})
    assert msgspec.json.decode(msgspec.json.encode(m), type=Measurement) == m
