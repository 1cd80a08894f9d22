"""Real managers, senders, receivers and pools of SGLang in one process: pages arrive bit for bit, or not at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import inprocess
import pytest
import torch
from inprocess import MHA, MLA, OPTIONS, Pages, Pair, failure, mha_pool, mla_pool, pages_of, wait
from sglang.srt.disaggregation.base.conn import KVPoll

KINDS = {"mha-1": (mha_pool, MHA, 1), "mha-16": (mha_pool, MHA, 16), "mla-16": (mla_pool, MLA, 16)}


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    make, config, page_size = KINDS[request.param]
    with Pair(make, config, page_size) as made:
        yield made


ROOMS = iter(range(1000, 2000))


def start(pair: Pair, total: int, prefix: int = 0) -> tuple[int, Pages, Pages, Any, Any]:
    """Both ends of a request whose decode side waits for its pages."""
    room, size = next(ROOMS), pair.page_size
    source, target = pages_of(total - prefix, room, size), pages_of(total - prefix, room + 1, size)
    (sender,), (receiver,) = pair.request(room, target, prefix)
    pair.write_aux(room)
    return room, source, target, sender, receiver


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


def test_an_abort_of_the_decode_side_before_anything_was_sent_ends_both(pair: Pair) -> None:
    *_, source, _, sender, receiver = start(pair, 300)
    sender.init(len(source), aux_index=1)
    receiver.abort()
    assert pair.settle(sender) == ["Failed"]
    sender.send(source, num_kv_tokens=300)
    assert "Aborted" in failure(receiver)
    assert "decode engine aborted" in failure(sender)
    nothing_left(pair)


def test_an_abort_of_the_decode_side_while_it_is_sent_leaves_its_pages_alone(pair: Pair) -> None:
    total, size = 700, pair.page_size
    *_, source, target, sender, receiver = start(pair, total)
    sender.init(len(source), aux_index=1)
    sender.describe(total, OPTIONS)
    sender.send(source[: 512 // size], num_kv_tokens=512)
    rows = inprocess.slots(target, size, 512)
    wait(lambda: all(x[rows].any() for x in inprocess.tensors(pair.decode.pool)), "the first cells")
    receiver.abort()
    assert "Aborted" in failure(receiver)
    for x in inprocess.tensors(pair.decode.pool):
        x[rows] = 7  # the pages are another request's from here on
    sender.send(source[512 // size :], num_kv_tokens=total - 512)
    if pair.settle(sender) == ["Failed"]:
        failure(sender)
    else:  # all was encoded before it heard of the abort
        sender.clear()
    nothing_left(pair)
    assert all((x[rows] == 7).all() for x in inprocess.tensors(pair.decode.pool))


def test_an_abort_of_the_prefill_side_fails_the_decode_side(pair: Pair) -> None:
    total, size = 700, pair.page_size
    *_, source, _, sender, receiver = start(pair, total)
    sender.init(len(source), aux_index=1)
    sender.describe(total, OPTIONS)
    sender.send(source[: 512 // size], num_kv_tokens=512)
    wait(lambda: pair.decode.manager.side.active, "the fetch")
    sender.abort()
    assert pair.settle(receiver, sender) == ["Failed", "Failed"]
    assert "prefill engine aborted" in failure(receiver)
    assert "Aborted" in failure(sender)
    nothing_left(pair)


def nothing_left(pair: Pair) -> None:
    """No room, no transfer and no published byte, on either side."""
    sides = (pair.prefill.manager.side, pair.decode.manager.side)
    wait(lambda: not any(side.active for side in sides), "the end of all transfers")
    assert sides[0].producer.budget.held_bytes == 0
    assert not pair.prefill.manager.request_status
    assert not pair.decode.manager.request_status


def test_nothing_is_left_after_all_of_it(pair: Pair) -> None:
    nothing_left(pair)
