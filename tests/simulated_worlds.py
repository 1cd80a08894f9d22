"""Small libraries and worlds."""

from __future__ import annotations

from typing import Any

from kvserve_core.latency import Speed
from kvserve_core.library import Profile, ProfileLibrary, QualityRecord, built_in
from kvserve_core.profile import RAW_CHAIN, PipelineSpec
from kvserve_core.simulate.run import World, world
from kvserve_core.simulate.scenario import Scenario

EXACT = {"speeds": {"drift": 0, "noise": 0, "ratio_noise": 0}, "engine": {"prefill_noise": 0, "prefill_workers": 0}}
"""Nothing that is random but the arrivals."""


def profile(name: str, cr: float, bytes_per_s: float, quality: float = 1.0) -> Profile:
    record = QualityRecord(value=quality, lower=quality, upper=quality, metric="m", samples=9)
    each = Speed.of(bytes_per_s)
    spec = PipelineSpec(planes={"*": RAW_CHAIN})
    return Profile(name=name, pipeline=spec, cr=cr, encode=each, decode=each, quality={"default": record})


def library() -> ProfileLibrary:
    """Free raw, a fast profile, a small one, and one that no floor of 0.99 lets through."""
    profiles = (
        built_in("raw", 1.0, Speed(), Speed()),
        profile("fast", 3.0, 40e9),
        profile("small", 8.0, 10e9),
        profile("poor", 20.0, 40e9, quality=0.5),
    )
    return ProfileLibrary(model_id="m", fingerprint="", device="d", created="", profiles=profiles)


def made(lib: ProfileLibrary | None = None, **fields: Any) -> World:
    return world(Scenario(**fields), lib)
