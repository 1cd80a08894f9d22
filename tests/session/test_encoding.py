"""Batches: one at a time on a CPU, one ahead on a GPU, and never more."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fake_engine import dense
from kvserve_core.metrics import Counters
from kvserve_core.pipeline import Pipeline
from kvserve_core.profile import RAW_PIPELINE
from kvserve_core.registry import default_registry
from kvserve_core.session.encoding import Encoding
from kvserve_core.session.lanes import Lane
from kvserve_core.session.source import Source
from kvserve_core.spec import Region, whole
from kvserve_core.wire import Sealed

TOTAL = 1024


class Watched(Source):
    """Says when segments become available."""

    log: list[str]

    def add(self, sealed: Sequence[Sealed], encode_s: float) -> None:
        assert encode_s >= 0
        self.log.append("available")
        super().add(sealed, encode_s)


class Stand:
    def __init__(self, ahead: bool) -> None:
        self.log: list[str] = []
        self.held = self.most = 0
        kv = dense()
        self.pipeline = Pipeline.build(RAW_PIPELINE, kv, whole(kv))
        self.source = Watched(self.pipeline, "t", TOTAL, "raw", "default")
        self.source.log = self.log
        self.batch_bytes = max(kv.nbytes(at) for at in self.source.plan)  # a segment of a full cell
        lane = Lane(torch.device("cpu"))
        if ahead:
            lane.device = torch.device("cuda")  # its streams are absent, its order of work is not
        transport = default_registry().create("transport", "memory")
        self.encoding = Encoding(self.gather, transport, lane, self.batch_bytes, Counters())

    def gather(self, transfer_id: str, at: Region) -> torch.Tensor:
        plane = self.pipeline.kv.group(at.group).plane(at.plane)
        x = torch.zeros(len(at.layers), len(at.heads), at.num_tokens, plane.dim, dtype=torch.bfloat16)
        size = x.numel() * 2
        self.held += size
        self.most = max(self.most, self.held)
        weakref.finalize(x, self.gone, size)
        self.log.append("gathered")
        return x

    def gone(self, size: int) -> None:
        self.held -= size

    def run(self) -> None:
        self.encoding.run(self.source, self.source.newly_final(range(TOTAL)), None)


@pytest.mark.parametrize(("ahead", "batches"), [(False, 1), (True, 2)])
def test_as_many_batches_are_held_as_the_device_works_on(ahead: bool, batches: int) -> None:
    gc.collect()
    stand = Stand(ahead)
    stand.run()
    assert stand.source.complete
    assert stand.most <= batches * stand.batch_bytes
    order = [k for i, k in enumerate(stand.log) if i == 0 or stand.log[i - 1] != k or k == "available"]
    first = order.index("available")
    assert first == 1
    gathered_before = stand.log[: stand.log.index("available")].count("gathered")
    alone = Stand(False)
    alone.run()
    one_batch = alone.log[: alone.log.index("available")].count("gathered")
    assert (gathered_before > one_batch) is ahead


def test_a_closed_source_is_not_encoded_further() -> None:
    stand = Stand(True)
    inner = stand.gather

    def closing(transfer_id: str, at: Region) -> Any:
        if len(stand.log) > 3:
            stand.source.close("the client went away")
        return inner(transfer_id, at)

    stand.encoding._gather = closing
    stand.run()
    assert not stand.source.complete
    assert stand.log.count("gathered") < len(stand.source.plan)
