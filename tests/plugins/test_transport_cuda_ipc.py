"""``cuda_ipc`` but for CUDA: tickets, places, credit, bucket, lost peers, over memory that processes share."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import msgspec
import pytest
import torch

from kvserve_core.errors import FrameError, IntegrityError, PeerLost, TransportError
from kvserve_core.wire import Codebook
from kvserve_plugins.transports._lending import Ticket, read_ticket
from kvserve_plugins.transports._slots import ALIGN, Slots
from plugins.shared_memory import MIB, HostIpc, HostMemory, OnDevice, consume, made, produce
from plugins.transport_checks import Source, check, fetch_all, settle, soon, threads, want


@pytest.fixture
def transport() -> Iterator[HostIpc]:
    one = made()
    yield one
    one.close()
    assert not threads()


def slots(transport: HostIpc) -> Slots:
    return transport._server._carrier.slots


def test_bodies_arrive_through_shared_memory_and_unseal(transport: HostIpc) -> None:
    source = OnDevice()
    address = transport.publish("t", source, 30)
    assert address.startswith("cuda_ipc://127.0.0.1:")
    delivery = transport.fetch(address, "t", want(source.plan), soon())
    got = list(delivery)
    check(got, source)
    assert all(isinstance(s.body, torch.Tensor) and s.hashes is not None for s in got)
    assert delivery.stats.nbytes >= sum(s.nbytes for s in got)
    assert slots(transport).taken_bytes == 0


def test_bodies_on_the_host_are_lent_too(transport: HostIpc) -> None:
    source = Source(3, 1000)
    got = fetch_all(transport, transport.publish("t", source, 30), source)
    check(got, source)


def test_more_bytes_than_staging_go_through_as_places_become_free(transport: HostIpc) -> None:
    source = OnDevice(40, 200_000)
    check(fetch_all(transport, transport.publish("t", source, 30), source), source)
    assert slots(transport).taken_bytes == 0


def test_a_segment_larger_than_staging_fails_with_what_to_set(transport: HostIpc) -> None:
    source = OnDevice(1, 2 * MIB)
    address = transport.publish("t", source, 30)
    with pytest.raises(PeerLost, match="'staging'"):
        fetch_all(transport, address, source)


def test_places_stay_taken_until_the_consumer_has_copied_and_are_free_after_it_gives_up(transport: HostIpc) -> None:
    source = OnDevice(4, 64_000)
    address = transport.publish("t", source, 30)
    delivery = transport.fetch(address, "t", want(source.plan), soon())
    settle(lambda: slots(transport).taken_bytes >= 4 * 64_000)
    got = iter(delivery)
    next(got)
    settle(lambda: slots(transport).taken_bytes < 4 * 64_000)
    delivery.close()
    settle(lambda: slots(transport).taken_bytes == 0)


def test_a_withdrawn_transfer_frees_its_places(transport: HostIpc) -> None:
    source = OnDevice(4, 64_000)
    address = transport.publish("t", source, 30)
    delivery = transport.fetch(address, "t", want(source.plan), soon())
    settle(lambda: slots(transport).taken_bytes > 0)
    transport.withdraw("t", "no longer wanted")
    settle(lambda: slots(transport).taken_bytes == 0)
    with pytest.raises(PeerLost, match="no longer wanted"):
        list(delivery)


def test_a_place_that_is_used_again_too_early_is_noticed(transport: HostIpc) -> None:
    source = OnDevice(1, 64_000)
    address = transport.publish("t", source, 30)
    delivery = transport.fetch(address, "t", want(source.plan), soon())
    memory = transport._server._carrier._memory
    settle(lambda: memory.laid == 1)
    transport._server._carrier._room[100] ^= 1
    (sealed,) = list(delivery)
    with pytest.raises(IntegrityError):
        Codebook(source.header).unseal(sealed)


def test_a_damaged_segment_is_noticed() -> None:
    faulty = made(faults="corrupt:1")
    source = OnDevice(1, 64_000)
    (sealed,) = fetch_all(faulty, faulty.publish("t", source, 30), source)
    with pytest.raises(IntegrityError):
        Codebook(source.header).unseal(sealed)
    faulty.close()


def test_the_bucket_counts_bodies_not_tickets() -> None:
    slow = made(max_bandwidth="8Mbps")
    source = OnDevice(5, 40_000)
    delivery = slow.fetch(slow.publish("t", source, 30), "t", want(source.plan), soon())
    check(list(delivery), source)
    assert delivery.stats.link_s >= 0.9 * 200_000 / 1e6  # a lower bound: the bucket holds bytes back
    slow.close()


def test_a_killed_consumer_frees_its_places(transport: HostIpc) -> None:
    source = OnDevice(40, 64_000)  # more than fits at a time
    address = transport.publish("t", source, 60)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=consume, args=(address, theirs), daemon=True)
    process.start()
    theirs.close()
    assert ours.recv()
    settle(lambda: slots(transport).taken_bytes > 0)
    process.kill()
    process.join()
    settle(lambda: slots(transport).taken_bytes == 0, 20)


def test_the_memory_of_a_killed_producer_is_unmapped(transport: HostIpc) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=produce, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    address = ours.recv()
    delivery = iter(transport.fetch(address, "t", want(Source(4).plan), soon()))
    next(delivery)
    memory = transport.memory
    assert isinstance(memory, HostMemory)
    (left,) = memory.mapped.values()
    process.kill()
    process.join()
    left.unlink()  # of a GPU the driver would do it
    with pytest.raises(PeerLost):
        next(delivery)
    assert not memory.mapped


@pytest.mark.parametrize("ticket", [Ticket(b"h", 100, 50), Ticket(b"h", 100, -1)])
def test_a_ticket_outside_its_memory_is_refused(ticket: Ticket) -> None:
    with pytest.raises(FrameError, match="memory of 100"):
        read_ticket(memoryview(msgspec.msgpack.encode(ticket)), 64, "segment 0")


def test_a_malformed_ticket_is_refused() -> None:
    with pytest.raises(FrameError, match="malformed ticket"):
        read_ticket(memoryview(b"\xc1"), 64, "segment 0")


def test_addresses_of_tcp_are_not_taken(transport: HostIpc) -> None:
    with pytest.raises(TransportError):
        transport.fetch("cuda_ipc://nowhere", "t", want(Source().plan), soon(1))


def test_other_interfaces_than_loopback_are_refused() -> None:
    with pytest.raises(ValueError, match="within one host"):
        HostIpc.Config(bind="10.0.0.5", insecure=True)


def test_memory_that_cannot_be_had_fails_one_fetch_and_the_next_one_works(
    transport: HostIpc, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = OnDevice(2)
    address = transport.publish("t", source, 30)
    with monkeypatch.context() as patch:
        patch.setattr(transport.memory, "put", lambda room, body: (_ for _ in ()).throw(RuntimeError("out of memory")))
        with pytest.raises(PeerLost, match="out of memory"):
            fetch_all(transport, address, source)
    check(fetch_all(transport, address, source), source)
    assert slots(transport).taken_bytes == 0


def test_slots_join_and_are_taken_again() -> None:
    room = Slots(4 * ALIGN)
    first, second, third = (room.take(n) for n in (1, ALIGN, 2 * ALIGN))
    assert (first, second, third) == (0, ALIGN, 2 * ALIGN)
    assert room.take(1) is None
    room.give(0)
    room.give(2 * ALIGN)
    assert room.take(2 * ALIGN) == 2 * ALIGN
    room.give(ALIGN)
    room.give(ALIGN)
    assert room.take(2 * ALIGN) == 0
    assert room.taken_bytes == 4 * ALIGN
