"""How requests end that do not succeed, on either side of the real SGLang: nothing is left, nobody else is harmed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import inprocess
import msgspec
import pytest
import zmq
from inprocess import OPTIONS, SENDER_EXTRA, Pair, failure, pages_of, spy, wait
from inprocess_kinds import KINDS, ROOMS, nothing_left, start
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class

from kvserve_sglang.messages import Wanted, pack


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    make, config, page_size = KINDS[request.param]
    with Pair(make, config, page_size) as made:
        yield made


def test_an_abort_of_the_decode_side_before_anything_was_sent_ends_both(pair: Pair) -> None:
    *_, source, _, sender, receiver = start(pair, 300)
    sender.init(len(source), aux_index=1)
    receiver.abort()
    assert pair.settle(sender) == ["Failed"]
    sender.send(source, num_kv_tokens=300)
    assert "Aborted" in failure(receiver)
    assert "decode engine aborted" in failure(sender)
    nothing_left(pair)


def test_an_abort_of_the_decode_side_while_it_is_sent_leaves_its_pages_alone(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    total, size = 700, pair.page_size
    *_, source, target, sender, receiver = start(pair, total)
    sender.init(len(source), aux_index=1)
    sender.describe(total, OPTIONS)
    for consumer in pair.decode.manager.side._sessions:
        monkeypatch.setattr(consumer, "_batch_bytes", 1)  # cells are written as they come
    for x in inprocess.tensors(pair.decode.pool):
        x.zero_()
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


def halves(pair: Pair) -> tuple[int, Any, Any]:
    """A room, and what makes its sender and its receiver, in any order."""
    manager, room = pair.decode.manager, next(ROOMS)
    wait(lambda: manager.try_ensure_parallel_info(pair.address), "the prefill's topology")
    sender, receiver = (get_kv_class(TransferBackend("kvserve"), k) for k in (KVClassType.SENDER, KVClassType.RECEIVER))

    def ask() -> Any:
        made = receiver(manager, pair.address, room)
        made.init(0)
        made.send_metadata(pages_of(300, room, pair.page_size), aux_index=5)
        return made

    return room, lambda: sender(pair.prefill.manager, pair.address, room, **SENDER_EXTRA), ask


def test_who_asks_for_a_request_that_was_aborted_before_is_told_at_once(pair: Pair) -> None:
    room, send, ask = halves(pair)
    sender = send()
    sender.abort()
    failure(sender)
    receiver = ask()
    assert pair.settle(receiver) == ["Failed"]
    assert "prefill engine" in failure(receiver)
    nothing_left(pair)
    assert room not in pair.prefill.manager.transfer_infos


def test_a_request_that_comes_after_the_decode_side_gave_up_fails_at_once(pair: Pair) -> None:
    room, send, ask = halves(pair)
    receiver = ask()
    manager = pair.prefill.manager
    wait(lambda: room in manager.transfer_infos, "the question")
    receiver.abort()
    failure(receiver)
    wait(lambda: room not in manager.transfer_infos, "the abort")
    nothing_left(pair)
    sender = send()
    assert pair.settle(sender) == ["Failed"]
    assert "decode engine aborted" in failure(sender)
    nothing_left(pair)
    assert not manager.failure_records


def test_decode_servers_that_are_refused_and_take_no_answer_stop_nobody(pair: Pair) -> None:
    """More than SGLang's sockets queue for a peer; each further one would wait for 30 s."""
    manager, wanted = pair.prefill.manager, Wanted(0, "127.0.0.1", 9, "nobody", 1, 0, False)
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.set_hwm(0)
        socket.connect(f"tcp://127.0.0.1:{manager.rank_port}")
        for i in range(1500):
            socket.send_multipart(pack(msgspec.structs.replace(wanted, room=10**6 + i)))
        wait(lambda: 10**6 + 1499 in manager.lobby._over, "the last refusal")
    served(pair)
    nothing_left(pair)
    assert not manager.transfer_infos


def test_a_pool_that_is_handed_over_twice_is_taken_once(pair: Pair) -> None:
    for side in (pair.prefill, pair.decode):
        bound, threads = side.manager.side, threading.active_count()
        side.manager.bind(side.manager.setup.engine)
        assert side.manager.side is bound
        assert threading.active_count() == threads


def test_a_page_that_does_not_exist_fails_its_request(pair: Pair) -> None:
    _, source, _, sender, receiver = start(pair, 300)
    sender.init(len(source), aux_index=1)
    sender.send(-source, num_kv_tokens=300)
    assert pair.settle(sender, receiver) == ["Failed", "Failed"]
    assert "whole numbers from 0" in failure(sender)
    failure(receiver)
    nothing_left(pair)


def test_a_success_that_somebody_else_claims_is_not_believed(pair: Pair) -> None:
    room, *_, sender, receiver = start(pair, 300)
    claim = pair.prefill.manager._encode_kv_status_message
    frames = claim(bootstrap_room=room, status=KVPoll.Success, failure_reason=None)
    pair.decode.manager._take_as_decode(frames)
    assert receiver.poll() != KVPoll.Success
    pair.decode.manager._take_as_decode(claim(bootstrap_room=room, status=KVPoll.Failed, failure_reason="a test's"))
    assert pair.settle(receiver) == ["Failed"]
    assert "a test's" in failure(receiver)
    sender.abort()
    failure(sender)
    nothing_left(pair)


def broken(*args: Any) -> Any:
    raise ZeroDivisionError("a test's")


def test_a_prefill_that_cannot_be_timed_is_sent_all_the_same(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = spy(monkeypatch, pair.prefill.manager, "hook_failed")
    _, source, target, sender, receiver = start(pair, 300)
    sender.init(len(source), aux_index=1)
    sender.describe(300, OPTIONS, prefilled=broken)
    sender.send(source, num_kv_tokens=300)
    assert pair.settle(receiver, sender) == ["Success", "Success"]
    assert pair.same(source, target, 300)
    assert counted == [("prefilled",)]
    sender.clear()
    receiver.clear()


@pytest.mark.parametrize("hook", ["send_metadata", "_register_kv_args", "host"])
def test_what_fails_in_a_hook_of_the_decode_side_ends_its_request_alone(
    pair: Pair, hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = pair.decode.manager
    wait(lambda: manager.try_ensure_parallel_info(pair.address), "the prefill's topology")
    receiver = get_kv_class(TransferBackend("kvserve"), KVClassType.RECEIVER)(manager, pair.address, 990)
    counted = spy(monkeypatch, manager, "hook_failed")
    destination, reason = None, "ZeroDivisionError: a test's"
    with monkeypatch.context() as patch:
        if hook == "_register_kv_args":
            manager.connection_pool.clear()
            patch.setattr(manager.side, "peer", broken)
        elif hook == "send_metadata":
            patch.setattr(manager, "slots", broken)
        else:
            destination, reason, hook = SimpleNamespace(value="host"), "device pages only", "send_metadata"
        receiver.init(0)
        if hook == "send_metadata":
            receiver.send_metadata(pages_of(300, 2, pair.page_size), aux_index=5, destination=destination)
    assert pair.settle(receiver) == ["Failed"]
    assert reason in failure(receiver)
    assert counted == [(hook,)]
    nothing_left(pair)
    served(pair)


def served(pair: Pair) -> None:
    """The next request is."""
    _, source, target, sender, receiver = start(pair, 300)
    sender.init(len(source), aux_index=1)
    sender.send(source, num_kv_tokens=300)
    assert pair.settle(receiver, sender) == ["Success", "Success"]
    assert pair.same(source, target, 300)
    sender.clear()
    receiver.clear()
