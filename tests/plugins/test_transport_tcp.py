"""tcp between processes: dead, stopped and hostile peers, keys, limits and faults."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvserve_core.errors import (
    ConfigError,
    FrameError,
    IntegrityError,
    LeaseLost,
    PeerLost,
    TransferTimeout,
    TransportError,
)
from kvserve_core.policy import Outcome
from kvserve_core.wire import Codebook, pack_header
from kvserve_plugins.transports import _tcp_link
from kvserve_plugins.transports import _tcp_messages as msg
from kvserve_plugins.transports._tcp_address import parse
from kvserve_plugins.transports.tcp import Tcp, create_keys
from plugins.transport_checks import LONG, Source, check, fetch_all, remote_producer, settle, soon, threads, want


@pytest.fixture
def consumer() -> Iterator[Tcp]:
    made = Tcp(Tcp.Config())
    yield made
    made.close()
    assert not threads()


def test_two_processes_fetch_renew_release(consumer: Tcp) -> None:
    with remote_producer(count=6, size=3_000_000) as remote:
        source = Source(6, 3_000_000)
        check(fetch_all(consumer, remote.address, source), source)
        consumer.renew(remote.address, "t", 100)
        with pytest.raises(LeaseLost, match="'other'"):
            consumer.renew(remote.address, "other", 100)
        with pytest.raises(LeaseLost, match="'other'"):
            consumer.fetch(remote.address, "other", want(source.plan), soon())
        report = Outcome("t", "raw", 1, 2, transfer_s=0.25)
        consumer.release(remote.address, "t", (0, 1), report)

        def polled() -> list[object]:
            remote.pipe.send("poll")
            return remote.pipe.recv()

        ended: list[object] = []
        settle(lambda: ended.extend(polled()) or ended)
        assert ended == [("t", "", (report,))]


def test_a_consumer_opens_no_port_and_no_thread(consumer: Tcp) -> None:
    with remote_producer(count=2) as remote:
        check(fetch_all(consumer, remote.address, Source(2)), Source(2))
        assert not threads()


@pytest.mark.parametrize("seconds", [0.4])
def test_a_stopped_producer_meets_the_deadline(consumer: Tcp, seconds: float) -> None:
    with remote_producer(count=4, ready=False) as remote:
        delivery = consumer.fetch(remote.address, "t", want(Source(4).plan), soon(seconds))
        os.kill(remote.process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(TransferTimeout, match=r"tcp://127\.0\.0\.1:\d+ for 't' after 0\.\d+ s"):
                list(delivery)
        finally:
            os.kill(remote.process.pid, signal.SIGCONT)


def test_a_killed_producer_is_lost_long_before_the_deadline(consumer: Tcp) -> None:
    with remote_producer(count=4, ready=False) as remote:
        delivery = consumer.fetch(remote.address, "t", want(Source(4).plan), soon(600))
        remote.process.kill()
        with pytest.raises(PeerLost, match="closed the connection or died"):
            list(delivery)
        remote.process.join()
        with pytest.raises(PeerLost):
            consumer.fetch(remote.address, "t", want(Source(4).plan), soon(600))
        consumer.release(remote.address, "t", (0, 1), None)


def test_a_producer_that_kills_itself_in_the_middle_is_lost(consumer: Tcp) -> None:
    with remote_producer({"faults": "kill:3"}, count=6, size=100_000) as remote, pytest.raises(PeerLost):
        fetch_all(consumer, remote.address, Source(6, 100_000))


def test_many_slow_transfers_leave_room_for_a_ready_one(consumer: Tcp) -> None:
    producer = Tcp(Tcp.Config())
    waiting = [Source(2, ready=False) for _ in range(20)]
    for i, source in enumerate(waiting):
        address = producer.publish(f"w{i}", source, 60)
    fetches = [consumer.fetch(address, f"w{i}", want(s.plan), soon()) for i, s in enumerate(waiting)]
    source = Source(30)
    producer.publish("t", source, 60)
    check(fetch_all(consumer, address, source), source)
    for slow, fetch in zip(waiting, fetches, strict=True):
        slow.finish()
        check(list(fetch), slow)
    producer.close()


def test_a_consumer_that_reads_slowly_bounds_what_is_sent(consumer: Tcp) -> None:
    slow = Tcp(Tcp.Config(window="4MiB"))
    producer = Tcp(Tcp.Config())
    source = Source(64, 2**20)
    address = producer.publish("t", source, 60)
    delivery = iter(slow.fetch(address, "t", want(source.plan), soon()))
    next(delivery)
    sender = producer._server._sender  # type: ignore[union-attr]  # bound by publish
    settle(lambda: sender._turn and sender._turn[0].credit <= 0)
    check(fetch_all(consumer, address, source), source)
    assert len(sender._turn[0].todo) + len(sender._turn[0].outbox) >= 56
    assert len(list(delivery)) == 63
    slow.close()
    producer.close()


def test_the_bandwidth_limit_holds(consumer: Tcp) -> None:
    producer = Tcp(Tcp.Config(max_bandwidth="20Mbps"))
    source = Source(10, 25_000)
    address = producer.publish("t", source, 60)
    for _ in range(2):  # the second comes after an idle moment and gains nothing by it
        started = time.monotonic()
        delivery = consumer.fetch(address, "t", want(source.plan), soon())
        got = list(delivery)
        assert time.monotonic() - started >= 0.95 * sum(s.nbytes for s in got) / 2.5e6
        assert delivery.stats.seconds - delivery.stats.waited_s >= 0.9 * 250_000 / 2.5e6
        time.sleep(0.1)
    producer.close()


def test_waiting_for_the_encoder_is_told_apart_from_the_link(consumer: Tcp) -> None:
    producer = Tcp(Tcp.Config())
    source = Source(2, ready=False)
    address = producer.publish("t", source, 60)
    threading.Timer(0.3, source.finish).start()
    delivery = consumer.fetch(address, "t", want(source.plan), soon())
    check(list(delivery), source)
    assert delivery.stats.waited_s >= 0.2
    assert delivery.stats.seconds >= delivery.stats.waited_s
    assert delivery.stats.link_s > 0.0  # a link without a limit is fast, not unknown
    producer.close()


@pytest.mark.parametrize(
    ("faults", "error"), [("corrupt:2", IntegrityError), ("drop:2", PeerLost), ("delay:2:0.1", None)]
)
def test_faults(consumer: Tcp, faults: str, error: type[Exception] | None) -> None:
    producer = Tcp(Tcp.Config(faults=faults))
    source = Source(4, 300_000)
    address = producer.publish("t", source, 60)
    if error is None:
        check(fetch_all(consumer, address, source), source)
    else:
        with pytest.raises(error):
            check_unsealed(fetch_all(consumer, address, source), source)
    check(fetch_all(consumer, address, source), source)
    producer.close()


def check_unsealed(got: list, source: Source) -> None:
    for sealed in got:
        Codebook(source.header).unseal(sealed)


def test_garbage_on_the_socket_is_counted_and_harms_nobody(consumer: Tcp) -> None:
    import socket

    producer = Tcp(Tcp.Config())
    source = Source(4)
    address = producer.publish("t", source, 60)
    at = parse(address)
    with socket.create_connection((at.host, at.port)) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n" + os.urandom(4096))  # an old ZeroMQ would talk like this
    wrong = [[b""], [b"\xc1"], [os.urandom(100)], [b"a", b"b"], [b"\x80\x04cos\nsystem\n"], [b"\x91" * 5000]]
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 1000
        dealer.connect(at.zmq)
        for parts in wrong:
            dealer.send_multipart(parts)
        dealer.send(msg.encode(msg.Release("t", (5, 2), None)))
        dealer.send(msg.encode(msg.Credit(9, 5)))
        dealer.send(msg.encode(msg.Cancel(9)))
        server = producer._server
        settle(lambda: server is not None and server.malformed > len(wrong))
    check(fetch_all(consumer, address, source), source)
    producer.close()


class Fake:
    """A producer that answers a fetch with what it is given."""

    def __init__(self, *replies: list[bytes]) -> None:
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self._replies = replies
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self) -> None:
        owner, _ = self.router.recv_multipart()
        for parts in self._replies:
            self.router.send_multipart([owner, *parts])

    def close(self) -> None:
        self._thread.join()
        self.context.destroy(linger=0)


def hostile() -> list[tuple[str, list[list[bytes]]]]:
    source = Source(2, 64)
    header, sealed = pack_header(source.header), source.sealed[0]
    opened = [msg.encode(msg.Opened(0, 2)), header]
    head, body = bytes(sealed.head), bytes(sealed.body)

    def piece(index: int, offset: int, size: int, head: bytes, *data: bytes) -> list[bytes]:
        return [msg.encode(msg.Piece(0, index, offset, size, head)), *data]

    return [
        ("bytes that are no message", [[b"\xc1"]]),
        ("no header", [[msg.encode(msg.End(0, 0.0))]]),
        ("a damaged header", [[opened[0], header[:-1]]]),
        ("a body far larger than the header allows", [opened, piece(0, 0, 2**62, head, body)]),
        ("a segment of another frame", [opened, piece(7, 0, len(body), head, body)]),
        ("a segment twice", [opened, piece(0, 0, len(body), head, body), piece(0, 0, len(body), head, body)]),
        ("a piece out of order", [opened, piece(0, 32, len(body), head, body)]),
        ("pieces of two segments", [opened, piece(0, 0, 65, head, body), piece(1, 64, 65, b"", b"x")]),
        ("more than announced", [opened, piece(0, 0, 32, head, body)]),
        ("an empty piece", [opened, piece(0, 0, 64, head, b"")]),
        ("an empty piece after a whole one", [opened, piece(0, 0, 128, head, body), piece(0, 64, 128, b"", b"")]),
        ("a piece without a body", [opened, piece(0, 0, 64, head)]),
    ]


@pytest.mark.parametrize(("name", "replies"), hostile(), ids=[name for name, _ in hostile()])
def test_a_hostile_producer_gets_a_typed_error(consumer: Tcp, name: str, replies: list[list[bytes]]) -> None:
    fake = Fake(*replies)
    try:
        with pytest.raises(FrameError):
            list(consumer.fetch(fake.address, "t", want(Source(2).plan), soon()))
    finally:
        fake.close()


def test_nothing_listens(consumer: Tcp) -> None:
    with pytest.raises(PeerLost, match="nothing listens"):
        consumer.fetch("tcp://127.0.0.1:1", "t", want(Source().plan), soon(LONG))


def test_a_port_in_use_says_what_to_set(consumer: Tcp) -> None:
    producer = Tcp(Tcp.Config())
    port = parse(producer.address).port
    taken = Tcp(Tcp.Config(port=port))
    with pytest.raises(TransportError, match=r"set transport\.tcp\.bind"):
        taken.publish("t", Source(), 5)
    taken.close()
    producer.close()
    with pytest.raises(TransportError, match="closed"):
        producer.publish("t", Source(), 5)


def test_curve_keys_encrypt_and_admit(tmp_path: Path) -> None:
    create_keys(tmp_path / "keys")
    assert all(p.stat().st_mode & 0o077 == 0 for p in (tmp_path / "keys").iterdir())
    both = Tcp(Tcp.Config(key_dir=tmp_path / "keys"))
    source = Source(3, 2_000_000)
    address = both.publish("t", source, 30)
    check(fetch_all(both, address, source), source)
    both.close()
    assert not threads()


def test_keys_are_not_replaced(tmp_path: Path) -> None:
    create_keys(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match="holds keys already"):
        create_keys(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("wrong", ["server", "client", "none"])
def test_wrong_keys_are_refused_with_what_to_check(tmp_path: Path, wrong: str) -> None:
    create_keys(tmp_path / "keys")
    create_keys(tmp_path / "mine")
    if wrong == "client":  # knows the server, but the server does not know it
        (tmp_path / "mine" / "server.key").write_bytes((tmp_path / "keys" / "server.key").read_bytes())
    producer = Tcp(Tcp.Config(key_dir=tmp_path / "keys"))
    address = producer.publish("t", Source(), 30)
    intruder = Tcp(Tcp.Config(key_dir=None if wrong == "none" else tmp_path / "mine"))
    with pytest.raises((PeerLost, TransferTimeout), match="key"):
        intruder.fetch(address, "t", want(Source().plan), soon(2))
    intruder.close()
    producer.close()


def test_a_folder_without_keys_says_how_to_make_them(tmp_path: Path) -> None:
    producer = Tcp(Tcp.Config(key_dir=tmp_path))
    with pytest.raises(ConfigError, match="create_keys"):
        producer.publish("t", Source(), 5)
    producer.close()


def test_a_fork_uses_links_of_its_own(consumer: Tcp) -> None:
    consumer_links = consumer._links
    with remote_producer(count=2) as remote:
        check(fetch_all(consumer, remote.address, Source(2)), Source(2))
        at = parse(remote.address)
        assert len(consumer_links._idle[at]) == 1
        consumer_links._pid = -1  # what a child sees
        assert consumer_links._pop(at) is None
        for link in consumer_links._parents[at]:  # the parent would
            link.close()


@pytest.fixture
def silent() -> Iterator[str]:
    """Somebody who takes connections and says nothing, as where packets are dropped."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"tcp://127.0.0.1:{listening.getsockname()[1]}"


def test_a_peer_that_says_nothing_is_lost_long_before_the_deadline_and_then_at_once(silent: str) -> None:
    consumer = Tcp(Tcp.Config(heartbeat="100ms"))
    try:
        for within in ("it never came up", "it is known"):
            with pytest.raises(PeerLost, match=r"no connection to the producer at .* comes up"):
                consumer.fetch(silent, "t", want(Source().plan), time.monotonic() + 3600)
            assert parse(silent) in consumer._links._down, within
    finally:
        consumer.close()


def test_an_address_that_was_silent_is_tried_again(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tcp_link, "_DOWN_S", 0.0)
    producer, consumer = Tcp(Tcp.Config()), Tcp(Tcp.Config(heartbeat="100ms"))
    try:
        with pytest.raises(PeerLost):
            consumer.fetch(silent, "t", want(Source().plan), time.monotonic() + 3600)
        source = Source()
        address = producer.publish("t", source, 60)
        consumer._links._down[parse(address)] = 0.0
        check(list(consumer.fetch(address, "t", want(source.plan), soon())), source)
    finally:
        consumer.close()
        producer.close()
