"""The same demands on memory, file, tcp and nccl, the last over Gloo."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from kvserve_core.errors import (
    KVServeError,
    LeaseLost,
    PeerLost,
    TransferCancelled,
    TransferTimeout,
    TransportError,
    Unacceptable,
)
from kvserve_core.policy import Outcome
from kvserve_core.transport import Transport
from kvserve_plugins.transports.file import File
from kvserve_plugins.transports.memory import Memory
from kvserve_plugins.transports.nccl import Nccl
from kvserve_plugins.transports.tcp import Tcp
from plugins.transport_checks import PEER, Source, check, fetch_all, settle, soon, threads, want

KINDS = ("memory", "file", "tcp", "nccl")


def make(kind: str, folder: Path) -> Transport:
    if kind == "file":
        return File(File.Config(path=folder / "store"))
    if kind == "nccl":
        return Nccl(Nccl.Config(backend="gloo"))
    return Memory(Memory.Config()) if kind == "memory" else Tcp(Tcp.Config())


@pytest.fixture(params=KINDS)
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Transport]:
    made = make(request.param, tmp_path)
    yield made
    made.close()
    made.close()
    assert not threads()


@pytest.fixture(params=["memory", "tcp", "nccl"])
def leased(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Transport]:
    made = make(request.param, tmp_path)
    yield made
    made.close()
    assert not threads()


@pytest.mark.parametrize(("count", "size"), [(6, 1000), (1, 8), (3, 3_000_000), (300, 64)])
def test_everything_arrives_as_it_was(transport: Transport, count: int, size: int) -> None:
    source = Source(count, size)
    address = transport.publish("t", source, 30)
    delivery = transport.fetch(address, "t", want(source.plan), soon())
    got = list(delivery)
    assert delivery.header == source.header
    check(got, source)
    assert delivery.stats.nbytes >= sum(s.nbytes for s in got)
    assert 0 <= delivery.stats.waited_s <= delivery.stats.seconds


def test_a_selection_is_served_as_whole_covering_segments(transport: Transport) -> None:
    source = Source(6)
    address = transport.publish("t", source, 30)
    check(fetch_all(transport, address, source, 1, 4), source, 1, 4)
    part = msgspec.structs.replace(PEER, link="x")
    inside = replace(source.plan[2], start=source.plan[2].start + 5, stop=source.plan[2].start + 6)
    selection = replace(want(source.plan, 0, peer=part), regions=(inside,))
    check(list(transport.fetch(address, "t", selection, soon())), source, 2)


def test_a_selection_of_nothing_gives_the_header_only(transport: Transport) -> None:
    source = Source(2)
    address = transport.publish("t", source, 30)
    nothing = replace(want(source.plan), regions=())
    assert list(transport.fetch(address, "t", nothing, soon())) == []


def test_many_consumers_at_once(transport: Transport) -> None:
    source = Source(40, 20_000)
    address = transport.publish("t", source, 30)
    failed: list[BaseException] = []

    def consume() -> None:
        try:
            for _ in range(3):
                check(fetch_all(transport, address, source), source)
        except BaseException as error:  # noqa: BLE001  # reported by the main thread
            failed.append(error)

    workers = [threading.Thread(target=consume) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failed


def test_an_unknown_key_is_a_lost_lease(transport: Transport) -> None:
    address = transport.publish("t", Source(), 30)
    with pytest.raises(LeaseLost, match="'other'"):
        transport.fetch(address, "other", want(Source().plan), soon())
    with pytest.raises(LeaseLost, match="'other'"):
        transport.renew(address, "other", 5)
    transport.release(address, "other", (0, 1), None)


@pytest.mark.parametrize(
    ("change", "stage"),
    [
        ({"reads": {"quantizer:identity": (1,)}}, "codec:raw@1"),
        ({"reads": {"quantizer:identity": (1,), "codec:raw": (2,)}}, "codec:raw@1"),
        ({"fingerprint": "other"}, "model:ffffffffffffffff"),
        ({"wire": (2, 3)}, "frame@1"),
    ],
)
def test_a_peer_that_cannot_decode_is_refused(transport: Transport, change: dict[str, object], stage: str) -> None:
    source = Source()
    address = transport.publish("t", source, 30)
    peer = msgspec.structs.replace(PEER, **change)
    with pytest.raises(Unacceptable) as caught:
        list(transport.fetch(address, "t", want(source.plan, peer=peer), soon()))
    assert caught.value.stages == (stage,)


def test_addresses_of_other_kinds_are_refused(transport: Transport) -> None:
    for address in ("", "nonsense", "tcp://", "file:///elsewhere", "memory://nobody", "tcp://h:99999"):
        with pytest.raises(TransportError):
            transport.fetch(address, "t", want(Source().plan), soon(1))


def test_a_closed_delivery_stops(transport: Transport) -> None:
    source = Source(50, 200_000)
    address = transport.publish("t", source, 30)
    delivery = transport.fetch(address, "t", want(source.plan), soon())
    iterator = iter(delivery)
    next(iterator)
    delivery.close()
    delivery.close()
    with pytest.raises(TransferCancelled):
        list(iterator)
    check(fetch_all(transport, address, source), source)


def test_a_lease_must_be_positive(transport: Transport) -> None:
    for lease_s in (0.0, -1.0, float("nan")):
        with pytest.raises(TransportError, match="lease"):
            transport.publish("t", Source(), lease_s)


def test_a_taken_key_is_refused_and_free_again_after_withdraw(leased: Transport) -> None:
    leased.publish("t", Source(), 30)
    with pytest.raises(TransportError, match="published already"):
        leased.publish("t", Source(), 30)
    leased.withdraw("t", "done")
    assert leased.publish("t", Source(), 30) == leased.address


def test_release_by_shares_frees_once_and_collects_reports(leased: Transport) -> None:
    source = Source()
    address = leased.publish("t", source, 30)
    reports = [Outcome("t", "raw", 10, 10 + i, transfer_s=0.5) for i in range(2)]
    for i in (1, 1):
        leased.release(address, "t", (i, 2), reports[i])
    assert list(leased.poll()) == []
    check(fetch_all(leased, address, source), source)
    leased.release(address, "t", (0, 2), reports[0])
    (released,) = leased.poll()
    assert (released.key, released.reason) == ("t", "")
    assert sorted(r.wire_bytes for r in released.reports) == [10, 11]
    assert source.closed is not None
    with pytest.raises(LeaseLost):
        fetch_all(leased, address, source)


class Stuck(Source):
    """Says that it is complete, and gives only what was finished."""

    complete = True


def test_an_expired_lease_is_reported_and_ends_fetches(leased: Transport) -> None:
    source = Stuck(3, ready=False)
    address = leased.publish("t", source, 0.3)
    source.finish(0)
    delivery = iter(leased.fetch(address, "t", want(source.plan), soon()))
    next(delivery)
    ended: list[str] = []
    threading.Timer(0.5, lambda: ended.extend(r.reason for r in leased.poll())).start()
    with pytest.raises(LeaseLost, match="lease ran out"):
        list(delivery)
    settle(lambda: ended)
    assert ended == ["its lease ran out"]


def test_withdraw_fails_fetches_in_flight_with_the_reason(leased: Transport) -> None:
    source = Source(3, ready=False)
    address = leased.publish("t", source, 30)
    source.finish(0)
    delivery = iter(leased.fetch(address, "t", want(source.plan), soon()))
    next(delivery)
    threading.Timer(0.05, lambda: leased.withdraw("t", "the request was aborted")).start()
    with pytest.raises(PeerLost, match="the request was aborted"):
        list(delivery)
    assert [r.reason for r in leased.poll()] == ["the request was aborted"]


def test_a_fetch_that_comes_after_a_withdrawal_is_told_why(leased: Transport) -> None:
    source = Source()
    address = leased.publish("t", source, 30)
    leased.withdraw("t", "the request was aborted")
    with pytest.raises(PeerLost, match="the request was aborted"):
        list(leased.fetch(address, "t", want(source.plan), soon()))
    leased.publish("t", source, 30)
    check(fetch_all(leased, address, source), source)


def test_segments_come_while_others_are_still_encoded(leased: Transport) -> None:
    source = Source(3, ready=False)
    address = leased.publish("t", source, 30)
    delivery = leased.fetch(address, "t", want(source.plan), soon())
    iterator = iter(delivery)
    got = []
    for i in range(3):
        source.finish(i)
        got.append(next(iterator))
    assert next(iterator, None) is None
    check(got, source)


def test_a_source_that_never_gets_ready_meets_the_deadline(leased: Transport) -> None:
    source = Source(2, ready=False)
    address = leased.publish("t", source, 30)
    with pytest.raises(TransferTimeout, match=r"'t' after 0\.\d+ s"):
        list(leased.fetch(address, "t", want(source.plan), soon(0.2)))
    source.finish()
    check(fetch_all(leased, address, source), source)


def test_a_source_that_breaks_fails_its_own_transfer_only(leased: Transport) -> None:
    class Broken(Source):
        def get(self, index: int, deadline: float) -> object:  # type: ignore[override]  # broken on purpose
            raise PeerLost("encoder died")

    address = leased.publish("t", Source(), 30)
    leased.publish("b", Broken(), 30)
    with pytest.raises(KVServeError, match="encoder died"):
        list(leased.fetch(address, "b", want(Source().plan), soon()))
    check(fetch_all(leased, address, Source()), Source())


def test_close_fails_fetches_in_flight(leased: Transport) -> None:
    source = Source(2, ready=False)
    address = leased.publish("t", source, 30)
    other = type(leased)(leased.config) if isinstance(leased, Tcp) else leased
    delivery = other.fetch(address, "t", want(source.plan), soon())
    threading.Timer(0.05, leased.close).start()
    with pytest.raises(PeerLost):
        list(delivery)
    other.close()


@pytest.mark.parametrize("error", [KeyError, ValueError])
def test_an_error_of_the_source_itself_is_a_lost_peer(leased: Transport, error: type[Exception]) -> None:
    class Broken(Source):
        def get(self, index: int, deadline: float) -> object:  # type: ignore[override]  # broken on purpose
            raise error("inside")

    address = leased.publish("t", Broken(), 30)
    with pytest.raises(PeerLost, match="inside"):
        list(leased.fetch(address, "t", want(Source().plan), soon()))


def test_a_key_that_is_no_text_or_too_long_is_refused(transport: Transport) -> None:
    address = transport.publish("t", Source(), 30)
    for key in ("\ud800", "k" * 1025):
        for call in (
            lambda key=key: transport.publish(key, Source(), 30),
            lambda key=key: transport.fetch(address, key, want(Source().plan), soon()),
        ):
            with pytest.raises(TransportError, match="key"):
                call()


def test_too_many_regions_are_refused(transport: Transport) -> None:
    source = Source()
    address = transport.publish("t", source, 30)
    many = replace(want(source.plan), regions=(source.plan[0],) * 4097)
    with pytest.raises(TransportError, match="larger regions"):
        transport.fetch(address, "t", many, soon())
