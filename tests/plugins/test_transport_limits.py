"""What one consumer can make a tcp producer hold or do, and one producer a consumer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from kvserve_core.errors import (
    FrameError,
    PeerLost,
    TransferCancelled,
    TransferTimeout,
    TransportError,
)
from kvserve_core.transport import Released
from kvserve_core.wire import FrameHeader, Sealed, pack_header
from kvserve_plugins.transports import _tcp_link, _tcp_sender
from kvserve_plugins.transports import _tcp_messages as msg
from kvserve_plugins.transports._selection import MAX_REGIONS
from kvserve_plugins.transports._tcp_address import parse
from kvserve_plugins.transports._tcp_sender import MAX_PER_OWNER, Sender
from kvserve_plugins.transports.tcp import Tcp
from plugins.transport_checks import PEER, Source, check, fetch_all, settle, soon, threads, want


@pytest.fixture
def producer() -> Iterator[Tcp]:
    made = Tcp(Tcp.Config())
    yield made
    made.close()
    assert not threads()


@pytest.fixture
def consumer() -> Iterator[Tcp]:
    made = Tcp(Tcp.Config())
    yield made
    made.close()


def sender_of(producer: Tcp) -> Sender:
    assert producer._server is not None
    return producer._server._sender


@contextmanager
def raw_client(address: str, **options: int) -> Iterator[Callable[..., list[bytes]]]:
    """Sends a message, if any, and returns the next answer, or with ``answer=False`` nothing."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger, dealer.rcvtimeo = 0, 10_000
        for name, value in options.items():
            setattr(dealer, name, value)
        dealer.connect(parse(address).zmq)

        def say(request: msg.Request | None, answer: bool = True) -> list[bytes]:
            if request is not None:
                dealer.send(msg.encode(request))
            return dealer.recv_multipart() if answer else []

        yield say


def request(source: Source, stream: int = 0, credit: int = 0, key: str = "t") -> msg.Fetch:
    return msg.Fetch(stream, key, tuple(source.plan), PEER, credit, 3600.0)


def refused(parts: list[bytes]) -> str:
    reply = msg.decode_reply(parts[0])
    assert isinstance(reply, msg.Failed)
    return reply.detail


def test_too_many_regions_are_refused_on_both_sides(producer: Tcp, consumer: Tcp) -> None:
    source = Source(2)
    address = producer.publish("t", source, 60)
    many = replace(want(source.plan), regions=(source.plan[0],) * (MAX_REGIONS + 1))
    with pytest.raises(TransportError, match="larger regions"):
        consumer.fetch(address, "t", many, soon())
    with raw_client(address) as say:
        assert "length <= 4096" in refused(say(replace_regions(request(source), many.regions)))
        wide = replace(source.plan[0], layers=tuple(range(2**16)))
        assert "larger regions" in refused(say(replace_regions(request(source), (wide,) * 3)))


def replace_regions(fetch: msg.Fetch, regions: tuple) -> msg.Fetch:
    return msg.Fetch(fetch.stream, fetch.key, regions, fetch.peer, fetch.credit, fetch.timeout_s)


def test_streams_of_one_connection_are_bounded(producer: Tcp) -> None:
    source = Source(2)
    with raw_client(producer.publish("t", source, 60)) as say:
        for n in range(MAX_PER_OWNER):
            assert isinstance(msg.decode_reply(say(request(source, n))[0]), msg.Opened)
        assert "on this connection" in refused(say(request(source, MAX_PER_OWNER)))
        say(msg.Cancel(0), answer=False)
        assert isinstance(msg.decode_reply(say(request(source, 9))[0]), msg.Opened)


def test_a_starved_stream_gives_way_when_there_is_no_room(
    producer: Tcp, consumer: Tcp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tcp_sender, "MAX_STREAMS", 2)
    source = Source(2)
    address = producer.publish("t", source, 60)
    with raw_client(address) as say:
        for n in range(2):
            say(request(source, n))
        with pytest.raises(TransportError, match="try again later"):
            fetch_all(consumer, address, source)
        monkeypatch.setattr(_tcp_sender, "EVICT_S", 0.0)
        check(fetch_all(consumer, address, source), source)


def test_a_consumer_that_takes_nothing_is_given_up(producer: Tcp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tcp_sender, "STARVED_S", 0.2)
    source = Source(2)
    with raw_client(producer.publish("t", source, 60)) as say:
        say(request(source))
        assert "took nothing" in refused(say(None))


def test_streams_of_a_consumer_that_left_are_freed(producer: Tcp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tcp_sender, "BEAT_S", 0.05)
    source = Source(2, ready=False)
    with raw_client(producer.publish("t", source, 60)) as say:
        say(request(source, 0))
        say(request(source, 1, credit=10_000))
        settle(lambda: len(sender_of(producer)) == 2)
    settle(lambda: not len(sender_of(producer)))


def test_beats_are_not_noticed(producer: Tcp, consumer: Tcp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tcp_sender, "BEAT_S", 0.01)
    source = Source(3, ready=False)
    address = producer.publish("t", source, 60)
    beats: list[object] = []
    reply = sender_of(producer).reply
    monkeypatch.setattr(
        sender_of(producer),
        "reply",
        lambda to, parts: (beats.extend(p for p in parts if p == msg.BEAT), reply(to, parts))[1],
    )
    delivery = consumer.fetch(address, "t", want(source.plan), soon())
    got, iterator = [], iter(delivery)
    for i in range(3):
        seen = len(beats)
        settle(lambda seen=seen: len(beats) > seen)
        source.finish(i)
        got.append(next(iterator))
    assert next(iterator, None) is None
    check(got, source)


def test_answers_that_nobody_reads_are_bounded(monkeypatch: pytest.MonkeyPatch, producer: Tcp, consumer: Tcp) -> None:
    monkeypatch.setattr(msg, "MAX_QUEUED", 50)
    source = Source(2)
    address = producer.publish("t", source, 60)
    renew = msg.Renew(0, "k" * 1024, 5.0)
    with raw_client(address, rcvhwm=1, rcvbuf=4096) as say:
        for _ in range(20_000):
            say(renew, answer=False)
        settle(lambda: sender_of(producer).unsent > 0, 30)
    check(fetch_all(consumer, address, source), source)


@pytest.mark.parametrize("wrong", [None, b"bytes", Sealed(1, b"", b""), Sealed(0, b"", "text"), Sealed(0, None, b"")])
def test_what_is_no_segment_fails_its_own_transfer_only(producer: Tcp, consumer: Tcp, wrong: object) -> None:
    class Broken(Source):
        def get(self, index: int, deadline: float) -> Sealed:
            return wrong  # type: ignore[return-value]  # wrong on purpose

    assert_only_b_fails(producer, consumer, Broken(key="b"))


@pytest.mark.parametrize("error", [SystemExit, KeyError, RecursionError, lambda: TransportError("\ud800")])
def test_a_source_that_raises_anything_fails_its_own_transfer_only(
    producer: Tcp, consumer: Tcp, error: Callable[[], BaseException]
) -> None:
    class Broken(Source):
        def get(self, index: int, deadline: float) -> Sealed:
            raise error()

    assert_only_b_fails(producer, consumer, Broken(key="b"))


def test_a_source_without_a_header_or_completeness_fails_its_own_transfer_only(producer: Tcp, consumer: Tcp) -> None:
    class Broken(Source):
        @property
        def complete(self) -> bool:
            raise RuntimeError("no idea")

        @property
        def header(self) -> FrameHeader:
            raise SystemExit

        @header.setter
        def header(self, value: FrameHeader) -> None:
            self.real = value

        @property
        def plan(self) -> list:
            return []

        @plan.setter
        def plan(self, value: list) -> None:
            self.planned = value

        def __init__(self) -> None:
            self._changed = threading.Condition()

        def close(self, reason: str) -> None:
            raise RuntimeError("will not close")

    assert_only_b_fails(producer, consumer, Broken())


def assert_only_b_fails(producer: Tcp, consumer: Tcp, broken: Source) -> None:
    source = Source(4)
    address = producer.publish("b", broken, 60)
    producer.publish("t", source, 60)
    for _ in range(3):  # more than there are threads to lose
        with pytest.raises(PeerLost):
            list(consumer.fetch(address, "b", want(Source().plan), soon()))
    check(fetch_all(consumer, address, source), source)


def test_what_ended_names_its_source(producer: Tcp) -> None:
    first, second = Source(), Source()
    producer.publish("t", first, 60)
    producer.withdraw("t", "gone")
    producer.publish("t", second, 60)
    assert producer.poll() == [Released("t", "gone", (), first)]


class Dribble:
    """A producer that opens with a header and then sends what it is told, until closed."""

    def __init__(self, source: Source, pieces: Callable[[], Iterator[msg.Piece]], size: Callable[[], int]) -> None:
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self.address = f"tcp://127.0.0.1:{self._router.bind_to_random_port('tcp://127.0.0.1')}"
        self._source, self._pieces, self._size, self._stop = source, pieces, size, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        owner, _ = self._router.recv_multipart()
        opened = msg.Opened(0, len(self._source.plan))
        self._router.send_multipart([owner, msg.encode(opened), pack_header(self._source.header)])
        for piece in self._pieces():
            if self._stop.wait(0.005):
                return
            self._router.send_multipart([owner, msg.encode(piece), bytes(self._size())])

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)


def test_pieces_that_keep_coming_do_not_outlive_the_deadline(consumer: Tcp) -> None:
    source = Source(2000, 64)
    dribble = Dribble(source, lambda: (msg.Piece(0, i, 0, 64, b"") for i in range(2000)), lambda: 64)
    try:
        delivery = consumer.fetch(dribble.address, "t", want(source.plan, 0), soon(0.5))
        with pytest.raises(TransferTimeout, match="'t' after"):
            list(delivery)
    finally:
        dribble.close()


@pytest.mark.parametrize(("first", "then"), [(1, 1), (4095, 4095), (8192, 4096)])
def test_small_pieces_of_a_segment_are_refused(consumer: Tcp, first: int, then: int) -> None:
    source = Source(1, 16384)
    sizes = iter((first, then))
    pieces = (msg.Piece(0, 0, 0, 16384, b""), msg.Piece(0, 0, first, 16384, b""))
    dribble = Dribble(source, lambda: iter(pieces), lambda: next(sizes))
    try:
        delivery = consumer.fetch(dribble.address, "t", want(source.plan), soon())
        with pytest.raises(FrameError, match="piece of"):
            list(delivery)
    finally:
        dribble.close()


def test_closing_the_transport_ends_a_fetch_that_waits_for_its_header(consumer: Tcp) -> None:
    failed: list[BaseException] = []
    with zmq.Context() as context, context.socket(zmq.ROUTER) as silent:
        address = f"tcp://127.0.0.1:{silent.bind_to_random_port('tcp://127.0.0.1')}"

        def fetch() -> None:
            try:
                consumer.fetch(address, "t", want(Source().plan), soon(600))
            except TransferCancelled as error:
                failed.append(error)

        waiting = threading.Thread(target=fetch)
        waiting.start()
        silent.recv_multipart()  # it has asked
        consumer.close()
        waiting.join(30)
        assert not waiting.is_alive()
    assert "was closed" in str(failed[0])


def test_links_to_producers_that_are_gone_are_closed(consumer: Tcp) -> None:
    for _ in range(4):
        producer = Tcp(Tcp.Config())
        check(fetch_all(consumer, producer.publish("t", Source(), 60), Source()), Source())
        producer.close()

    def swept() -> bool:
        consumer._links._sweep()
        return not consumer._links._idle

    settle(swept)
    producer = Tcp(Tcp.Config())
    fetch_all(consumer, producer.publish("t", Source(), 60), Source())
    assert len(consumer._links._idle) == 1
    producer.close()


def test_a_new_link_sweeps_dead_ones_and_idle_peers_are_bounded(consumer: Tcp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tcp_link, "_IDLE_PEERS", 2)
    sweeps = []
    monkeypatch.setattr(consumer._links, "_sweep", lambda: sweeps.append(1))
    producers = [Tcp(Tcp.Config()) for _ in range(4)]
    addresses = [producer.publish("t", Source(), 60) for producer in producers]
    for i in (0, 1, 0, 2, 3):
        check(fetch_all(consumer, addresses[i], Source()), Source())
    assert list(consumer._links._idle) == [parse(addresses[i]) for i in (2, 3)]
    assert len(sweeps) == 4
    for producer in producers:
        producer.close()


def test_a_release_that_cannot_be_sent_closes_its_link(consumer: Tcp, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    real = _tcp_link.Link.close
    monkeypatch.setattr(_tcp_link.Link, "close", lambda self: (closed.append(self), real(self)))
    with zmq.Context() as context, context.socket(zmq.ROUTER) as silent:
        address = f"tcp://127.0.0.1:{silent.bind_to_random_port('tcp://127.0.0.1')}"
        with pytest.raises(TransportError, match="Release"):
            consumer.release(address, "\ud800", (0, 1), None)
    assert len(closed) == 1


def test_a_mismatch_of_security_is_said_whichever_side_sees_it(consumer: Tcp) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"

        def hang_up() -> None:
            server.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(PeerLost, match="key_dir"):
            consumer.fetch(address, "t", want(Source().plan), soon())
        thread.join()


@pytest.mark.parametrize("host", ["", "\0", "a b", "h/x", "h?x", "0.0.0.0", "*"])
def test_a_host_that_leads_nowhere_is_refused(host: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="advertise"):
        Tcp.Config(advertise=host)
    if host not in ("*", "0.0.0.0"):
        with pytest.raises(ValueError, match="bind"):
            Tcp.Config(bind=host, insecure=True)
        with pytest.raises(TransportError, match="not an address"):
            parse(f"tcp://{host}:5")
