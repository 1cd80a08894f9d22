"""``cuda_ipc`` but for CUDA: tickets, places, credit, bucket, lost peers, over memory that processes share."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import msgspec
import pytest
import torch

from kvserve_core.errors import FrameError, IntegrityError, PeerLost, TransportError
from kvserve_core.wire import Codebook
from kvserve_plugins.transports._host import host_id
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


def test_a_withdrawn_transfer_leaves_the_memory_mapped_for_others(transport: HostIpc) -> None:
    source, other = OnDevice(3, 64_000), OnDevice(3, 64_000)
    other._ready.clear()
    other.finish(0)
    address = transport.publish("t", other, 30)
    transport.publish("u", source, 30)
    waiting = iter(transport.fetch(address, "t", want(other.plan), soon()))
    next(waiting)
    transport.withdraw("t", "no longer wanted")
    with pytest.raises(PeerLost):
        next(waiting)
    assert isinstance(transport.memory, HostMemory)
    assert len(transport.memory.mapped) == 1
    check(list(transport.fetch(address, "u", want(source.plan), soon())), source)


def test_thousands_of_tickets_may_wait() -> None:
    roomy = made(staging=32 * MIB, heartbeat=5)
    source = OnDevice(3000, 1024)
    delivery = roomy.fetch(roomy.publish("t", source, 60), "t", want(source.plan), soon(30))
    settle(lambda: slots(roomy).taken_bytes >= 3000 * 1024)
    assert len(list(delivery)) == 3000
    roomy.close()


def test_a_segment_in_the_last_bytes_of_staging_is_refused_at_once() -> None:
    odd = made(staging=MIB + 64)
    source = OnDevice(1, MIB + 64)
    with pytest.raises(PeerLost, match="'staging'"):
        fetch_all(odd, odd.publish("t", source, 30), source)
    odd.close()


def test_what_nobody_waits_for_any_more_does_not_hold_the_link() -> None:
    slow = made(max_bandwidth="80kbps")
    large, small = OnDevice(1, 960_000), OnDevice(1, 640)  # 96 s of it, and a fifteenth of one
    address = slow.publish("t", large, 60)
    slow.publish("u", small, 60)
    given_up = slow.fetch(address, "t", want(large.plan), soon(90))
    settle(lambda: slots(slow).taken_bytes > 0)
    given_up.close()
    check(list(slow.fetch(address, "u", want(small.plan), soon(20))), small)
    slow.close()


def test_memory_that_cannot_be_shared_is_asked_for_once(transport: HostIpc, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refused(nbytes: int, like: object) -> None:
        asked.append(nbytes)
        raise TransportError("sharing GPU memory failed")

    monkeypatch.setattr(transport.memory, "allocate", refused)
    source = OnDevice(2)
    address = transport.publish("t", source, 30)
    for _ in range(2):
        with pytest.raises(PeerLost, match="sharing GPU memory failed"):
            fetch_all(transport, address, source)
    assert asked == [MIB]


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
    for query in ("", f"?host={host_id('net')}"):
        with pytest.raises(TransportError, match="works within one"):
            transport.fetch(f"cuda_ipc://10.0.0.9:5555{query}", "t", want(Source().plan), soon(1))


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
