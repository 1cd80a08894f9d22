"""On a GPU sessions work on streams of their own: nothing is read late, nothing written early."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvserve_core.session.lanes import Lane
from paged_engine import CUDA, Adversary

PACKED = {
    "transforms": ["hadamard"],
    "quantizer": {"name": "uniform", "configuration": {"levels": 16, "axis": "token_head"}},
    "codec": "bitpack",
}
EXACT = {"quantizer": "identity", "codec": "raw"}
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: a CPU has no streams that race"),
]


@pytest.fixture
def adversary(request: pytest.FixtureRequest) -> Iterator[Adversary]:
    chain, sms = request.param
    made = Adversary(chain, 2048, 4 * 2**20, sms)
    yield made
    made.close()


CASES = [
    pytest.param((PACKED, 0), id="packed"),
    pytest.param((EXACT, 0), id="exact"),
    pytest.param((PACKED, 16), id="budget"),
]


@pytest.mark.parametrize("adversary", CASES, indirect=True)
def test_blocks_may_be_overwritten_at_once(adversary: Adversary) -> None:
    assert [i for i in range(200) if not adversary.run(f"r{i}")] == []


@pytest.mark.parametrize("adversary", CASES[:1], indirect=True)
def test_overwriting_before_freed_shows(adversary: Adversary) -> None:
    assert not all(adversary.run(f"r{i}", early=True) for i in range(20))


def test_waiting_for_a_lane_waits_for_nothing_else() -> None:
    lane, other = Lane(CUDA), torch.cuda.Stream()
    torch.ones(1000, device=CUDA).sum().item()  # kernels are loaded when first used, which waits for the device
    with torch.cuda.stream(other):
        torch.cuda._sleep(400_000_000)
        busy = other.record_event()
    with lane.work():
        x = torch.ones(1000, device=CUDA).sum()
    lane.wait()
    assert not busy.query()
    assert x.item() == 1000


@pytest.mark.parametrize("event", [True, False])
def test_a_lane_starts_after_what_it_is_told(event: bool) -> None:
    lane, other, x = Lane(CUDA), torch.cuda.Stream(), torch.zeros(8, device=CUDA)
    with torch.cuda.stream(other):
        torch.cuda._sleep(100_000_000)
        x += 1
        mark: Any = other.record_event() if event else lane.mark()
    lane.after(mark)
    with lane.work():
        y = x.clone()
    lane.wait()
    assert y.tolist() == [1.0] * 8
