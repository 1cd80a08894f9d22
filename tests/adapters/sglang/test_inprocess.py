"""Real managers, senders, receivers and pools of SGLang in one process: pages arrive bit for bit."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import inprocess
import pytest
import torch
from inprocess import OPTIONS, Pair
from inprocess_kinds import KINDS, nothing_left, start
from sglang.srt.disaggregation.base.conn import KVPoll


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    make, config, page_size = KINDS[request.param]
    with Pair(make, config, page_size) as made:
        yield made


@pytest.mark.parametrize("total", [1, 255, 300, 612])
def test_pages_and_auxiliary_row_arrive_bit_for_bit(pair: Pair, total: int) -> None:
    room, source, target, sender, receiver = start(pair, total)
    sender.init(len(source), aux_index=1)
    sender.send(source, num_kv_tokens=total)
    assert pair.settle(receiver, sender) == ["Success", "Success"]
    assert pair.same(source, target, total)
    assert int(pair.decode.meta.output_ids[5, 0]) == 777
    assert int(pair.decode.meta.bootstrap_room[5, 0]) == room
    sender.clear()
    receiver.clear()


def test_cells_that_straddle_chunks_wait_until_they_are_final(pair: Pair) -> None:
    total, size = 700, pair.page_size
    _, source, target, sender, receiver = start(pair, total)
    sender.init(len(source), aux_index=1)
    sender.describe(total, OPTIONS)
    for first, stop in ((0, 96), (96, 320), (320, 688), (688, total)):
        sender.send(source[first // size : -(-stop // size)], num_kv_tokens=stop - first)
        time.sleep(0.02)
        assert (receiver.poll() == KVPoll.Success) <= (stop == total)
    assert pair.settle(receiver, sender) == ["Success", "Success"]
    assert pair.same(source, target, total)
    sender.clear()
    receiver.clear()


class Gate:
    """A fence such as ``torch.cuda.Event`` that the test opens."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.waited = threading.Event()

    def synchronize(self) -> None:
        self.waited.set()
        self.opened.wait()


def test_nothing_is_read_before_a_chunks_event_fired(pair: Pair) -> None:
    total = 400
    _, source, target, sender, receiver = start(pair, total)
    sender.init(len(source), aux_index=1)
    sender.describe(total, OPTIONS)
    gate, size = Gate(), pair.page_size
    sender._early_send_wait_event = gate  # as SGLang's scheduler sets it
    sender.send(source[: 320 // size], num_kv_tokens=320)
    assert gate.waited.wait(15)
    pair.fill(seed=50)  # the forward pass that was still under way
    gate.opened.set()
    sender.send(source[320 // size :], num_kv_tokens=total - 320)
    assert pair.settle(receiver, sender) == ["Success", "Success"]
    assert pair.same(source, target, total)
    sender.clear()
    receiver.clear()


def test_only_what_the_decode_side_lacks_is_sent_and_written(pair: Pair) -> None:
    total, prefix = 700, 272
    _, source, target, sender, receiver = start(pair, total, prefix)
    before = [x.clone() for x in inprocess.tensors(pair.decode.pool)]
    assert sender.pop_decode_prefix_len() == prefix
    sender.init(len(source), aux_index=1)
    sender.describe(total, OPTIONS)
    sender.send(source, num_kv_tokens=total - prefix)
    assert pair.settle(receiver, sender) == ["Success", "Success"]
    assert pair.same(source, target, total - prefix)
    written = inprocess.slots(target, pair.page_size, total - prefix)
    for old, new in zip(before, inprocess.tensors(pair.decode.pool), strict=True):
        others = torch.ones(len(old), dtype=torch.bool)
        others[written] = False
        assert torch.equal(old[others], new[others])
    sender.clear()
    receiver.clear()


@pytest.mark.parametrize("total", [16, 256, 512])
def test_of_a_prompt_that_the_decode_side_holds_only_the_row_is_written(pair: Pair, total: int) -> None:
    room, source, _, sender, receiver = start(pair, total, prefix=total)
    before = [x.clone() for x in inprocess.tensors(pair.decode.pool)]
    assert len(source) == 0
    sender.init(0, aux_index=1)
    sender.describe(total, OPTIONS)
    sender.send(source, num_kv_tokens=0)
    assert pair.settle(receiver, sender) == ["Success", "Success"]
    assert int(pair.decode.meta.bootstrap_room[5, 0]) == room
    assert all(torch.equal(a, b) for a, b in zip(before, inprocess.tensors(pair.decode.pool), strict=True))
    sender.clear()
    receiver.clear()


def test_nothing_is_left_after_all_of_it(pair: Pair) -> None:
    nothing_left(pair)
