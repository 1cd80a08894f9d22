"""Prompts that a calibrated profile is not made for go raw, the controller sees it and takes another profile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch
from blake3 import blake3
from torch import Tensor

from controller_cases import FREE_RAW, Clock, analytic, library, profile
from fake_engine import wait_for
from kvserve_core.artefacts import Artefacts
from kvserve_core.controller import Controller
from kvserve_core.pipeline import Pipeline
from kvserve_core.policy import Outcome, ServiceContext
from kvserve_core.pricing import HALF_LIFE_S, MIN_RATIO_BYTES
from kvserve_core.profile import RAW_PIPELINE, PipelineSpec
from kvserve_core.registry import default_registry
from kvserve_core.session import Consumer, Loaded, LoadFailed, Producer
from kvserve_core.spec import Region, whole
from kvserve_core.tensor import TORCH
from kvserve_core.transport import Locator
from plugins import klt_files

KV = klt_files.model()
TOKENS = 2048
NBYTES = TOKENS * KV.token_bytes()
SLOW = 1e4
"""bytes/s: what is sent decides, not how fast this machine codes."""
SOURCE = klt_files.Source()
BASIS = SOURCE.file(klt_files.PER_HEAD)
ARTEFACTS = Artefacts({blake3(BASIS).hexdigest(): BASIS})


def spec(transforms: list[object], quantizer: object) -> PipelineSpec:
    chain = {"transforms": transforms, "quantizer": quantizer, "codec": "rans"}
    return PipelineSpec.model_validate({"planes": {"kv": chain}, "layer_block": 2, "sink_tokens": 1})


CALIBRATED = spec(
    [{"name": "klt", "configuration": {"basis": blake3(BASIS).hexdigest()}}],
    {"name": "fixed_step", "configuration": {"step": 0.25}},
)
PLAIN = spec([], {"name": "uniform", "configuration": {"levels": 16, "axis": "token_head"}})
PIPELINES = {"raw": RAW_PIPELINE, "calibrated": CALIBRATED, "plain": PLAIN}


@dataclass
class Stand:
    """A prefill and a decode side. ``like``: whether prompts are like those that the basis was made from."""

    like: bool = True
    arrived: list[tuple[Region, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        shard = whole(KV)
        built = {n: Pipeline.build(s, KV, shard, artefacts=ARTEFACTS) for n, s in PIPELINES.items()}
        self._transport = default_registry().create("transport", "memory")
        self._producer = Producer(built, self._transport, self.gather)
        self._consumer = Consumer(KV, shard, lambda _: self._transport, self._scatter, artefacts=ARTEFACTS)
        self._count = 0

    def gather(self, _: str, at: Region) -> Tensor:
        """Values of one plane; both planes of a head are drawn together, layer block by layer block."""
        blocks = [
            self._joint(replace(at, plane="kv", layers=at.layers[i : i + 2])) for i in range(0, len(at.layers), 2)
        ]
        x = torch.cat(blocks)
        return x[..., : klt_files.DIM] if at.plane == "k" else x[..., klt_files.DIM :]

    def _joint(self, at: Region) -> Tensor:
        if self.like:
            return SOURCE.values(at, KV, seed=at.start)
        draw = torch.Generator().manual_seed(at.start)
        shape = (len(at.layers), len(at.heads), at.num_tokens, 2 * klt_files.DIM)
        return torch.randn(shape, generator=draw).to(TORCH[KV.groups[0].planes[0].dtype])

    def _scatter(self, _: str, at: Region, x: Tensor) -> None:
        self.arrived.append((at, x))

    def serve(self, control: Controller) -> Outcome:
        """One request as the controller chooses, reported to it."""
        self._count += 1
        self.arrived.clear()
        key, decision = f"t{self._count}", control.choose(ServiceContext(nbytes=NBYTES, bandwidth=SLOW))
        endpoint = self._producer.open(key, TOKENS, decision)
        self._producer.ready(key, range(TOKENS))
        self._consumer.fetch(Locator(key, TOKENS, (endpoint,), decision.profile), range(TOKENS), time.monotonic() + 60)
        event = wait_for(self._consumer.poll, (Loaded, LoadFailed), 60)
        assert isinstance(event, Loaded), event
        outcome = wait_for(self._producer.poll, Outcome)
        assert isinstance(outcome, Outcome)
        control.observe(decision, outcome)
        return outcome

    def close(self) -> None:
        for thing in (self._producer, self._consumer, self._transport):
            thing.close()


@pytest.fixture
def stand() -> Iterator[Stand]:
    made = Stand()
    yield made
    made.close()


def controller(clock: Clock) -> Controller:
    more = {"artefacts": (blake3(BASIS).hexdigest(),)}
    known = library(
        FREE_RAW,
        profile("calibrated", 12.0, 1e9, pipeline=CALIBRATED, **more),
        profile("plain", 3.0, 1e9, pipeline=PLAIN),
    )
    return Controller(known.with_artefacts(ARTEFACTS), analytic(), clock=clock)


def test_prompts_beyond_the_basis_go_raw_until_the_controller_has_learned_it(stand: Stand) -> None:
    assert NBYTES > MIN_RATIO_BYTES
    clock = Clock()
    control = controller(clock)
    usual = [stand.serve(control) for _ in range(3)]
    assert [o.profile for o in usual] == ["calibrated"] * 3
    assert min(o.raw_bytes / o.wire_bytes for o in usual) > 5

    stand.like = False
    drifted = [stand.serve(control)]
    assert drifted[0].profile == "calibrated"
    assert drifted[0].wire_bytes > 0.99 * drifted[0].raw_bytes, "every segment escaped"
    assert all(torch.equal(x, stand.gather("", at)) for at, x in stand.arrived), "what goes raw loses nothing"
    while drifted[-1].profile == "calibrated" and len(drifted) < 12:
        drifted.append(stand.serve(control))
    assert drifted[-1].profile == "plain"
    assert drifted[-1].raw_bytes > 2 * drifted[-1].wire_bytes
    assert stand.serve(control).profile == "plain", "and stays while nothing else is heard"

    clock.now += 10 * HALF_LIFE_S
    stand.like = True
    assert [stand.serve(control).profile for _ in range(2)] == ["calibrated"] * 2


def test_a_profile_that_is_tried_again_too_early_gives_way_sooner(stand: Stand) -> None:
    """Of a correction one half-life later a half is left, so that fewer raw transfers are needed than at first."""
    clock = Clock()
    control = controller(clock)
    stand.like = False
    first = until_plain(stand, control)
    clock.now += HALF_LIFE_S
    assert 0 < until_plain(stand, control) < first


def until_plain(stand: Stand, control: Controller) -> int:
    """How many transfers went through the calibrated profile."""
    for i in range(12):
        if stand.serve(control).profile == "plain":
            return i
    raise AssertionError("the controller never took another profile")
