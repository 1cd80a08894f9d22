"""The libraries that ship: what they say of themselves, and that they are the models'."""

from __future__ import annotations

import importlib.util
from datetime import datetime

import pytest

from kvserve_core.library import DEFAULT_WORKLOAD, RAW, ProfileLibrary
from kvserve_core.registry import default_registry
from kvserve_core.settings import cache_dir
from kvserve_hf.commands import LIBRARIES, shipped_library
from kvserve_hf.convert import MODELS, converted
from kvserve_hf.engine import Engine


@pytest.fixture(params=list(LIBRARIES))
def library(request: pytest.FixtureRequest) -> ProfileLibrary:
    return shipped_library(request.param)


def test_it_can_be_used_as_it_is(library: ProfileLibrary) -> None:
    library.check(default_registry().create)
    assert not [p.name for p in library.profiles if library.missing(p)]
    lossy = [p for p in library.profiles if not p.exact]
    for profile in lossy:
        assert profile.quality[DEFAULT_WORKLOAD].samples == 16
        assert profile.quality[DEFAULT_WORKLOAD].metric == "exp(-KL)"
        assert profile.encode.seconds(2**20) > 0
    assert max(p.cr for p in lossy if p.quality[DEFAULT_WORKLOAD].lower >= 0.97) > 10


def test_it_says_when_on_what_and_how_it_was_measured(library: ProfileLibrary) -> None:
    assert datetime.fromisoformat(library.created).tzinfo is not None
    assert library.device.startswith("cpu ")
    about = library.provenance
    assert about["pinned"] is True
    assert len(about["texts"]) == 16
    assert about["command"].startswith(("kvserve ", "python benchmarks/"))
    assert "/tmp" not in about["command"]


def test_a_searched_library_tells_its_search() -> None:
    about = shipped_library("gemma3").provenance["search"]
    assert about["candidates"] >= 1000
    assert len(about["families"]) >= 4
    assert len(about["trace"]) == about["evaluations"]


def test_nothing_in_it_is_beaten_by_what_loses_nothing(library: ProfileLibrary) -> None:
    exact = {p.name: p.cr for p in library.profiles if p.exact}
    assert exact[RAW] == pytest.approx(1.0, abs=0.01)
    assert all(p.cr > max(exact.values()) for p in library.profiles if not p.exact)


@pytest.mark.model
@pytest.mark.parametrize("model", list(LIBRARIES))
def test_it_is_the_model_s(model: str) -> None:
    there = any((cache_dir() / "models").glob(f"{MODELS[model].folder}-*/config.json"))
    if not there or any(importlib.util.find_spec(p) is None for p in (*MODELS[model].packages, "accelerate")):
        pytest.skip(f"needs real weights, converted once: {MODELS[model].install} and 'kvserve[hf]'")
    spec = Engine.load(converted(model), dtype="bfloat16").spec
    library = shipped_library(model)
    assert (library.fingerprint, library.model_id) == (spec.fingerprint, spec.model_id)
