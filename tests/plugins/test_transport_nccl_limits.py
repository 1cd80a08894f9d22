"""What one side of ``nccl`` can make the other hold or do: limits on pairs, hostile messages of either side."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from kvserve_core.errors import FrameError, KVServeError, PeerLost, TransferTimeout, TransportError
from kvserve_core.wire import pack_header
from kvserve_plugins.transports import _nccl_carrier
from kvserve_plugins.transports import _tcp_messages as msg
from kvserve_plugins.transports._nccl_carrier import MAX_JOBS, MAX_TAKE_BYTES, TOKEN_BYTES
from kvserve_plugins.transports._nccl_gloo import GlooBackend, Invite, local_address
from kvserve_plugins.transports._tcp_address import parse
from kvserve_plugins.transports.nccl import Nccl
from kvserve_plugins.transports.tcp import Tcp
from plugins.nccl_peers import carrier_of, made, pairs
from plugins.transport_checks import PEER, Source, check, fetch_all, settle, soon, threads, want


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    yield
    settle(lambda: not threads())


@pytest.fixture
def producer(tidy: None) -> Iterator[Nccl]:
    one = made(join_timeout=1)
    yield one
    one.close()


@pytest.fixture
def consumer(tidy: None) -> Iterator[Nccl]:
    one = made(join_timeout=1)
    yield one
    one.close()


@contextmanager
def raw_client(address: str) -> Iterator[Callable[..., msg.Reply | None]]:
    """Sends a message, if any, and returns the next answer but for beats, or with ``answer=False`` nothing."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger, dealer.rcvtimeo = 0, 10_000
        dealer.connect(parse(address, "nccl").zmq)

        def say(request: msg.Request | None = None, answer: bool = True) -> msg.Reply | None:
            if request is not None:
                dealer.send(msg.encode(request))
            while answer:
                reply = msg.decode_reply(dealer.recv_multipart()[0])
                if not isinstance(reply, msg.Beat):
                    return reply
            return None

        yield say


def joined(say: Callable[..., msg.Reply | None], check_: Any = lambda: None) -> Any:
    """A rank that receives what it likes."""
    reply = say(msg.Join(0, "gloo", ""))
    assert isinstance(reply, msg.Joined)
    return GlooBackend(5.0).guest(reply.invite, "127.0.0.1")(check_)


def detail(reply: msg.Reply | None) -> str:
    assert isinstance(reply, msg.Failed)
    return reply.detail


def test_a_producer_refuses_more_consumers_than_it_may_have_and_lets_unused_ones_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    producer, source = made(max_pairs=2), Source(2, 64_000)
    address = producer.publish("t", source, 60)
    consumers = [made() for _ in range(3)]
    for one in consumers[:2]:
        check(fetch_all(one, address, source), source)
    with pytest.raises(PeerLost, match="max_pairs"):
        fetch_all(consumers[2], address, source)
    monkeypatch.setattr(_nccl_carrier, "UNUSED_S", 0.0)
    check(fetch_all(consumers[2], address, source), source)
    assert len(pairs(producer)) == 2
    check(fetch_all(consumers[1], address, source), source)  # the first had to go, not this one
    check(fetch_all(consumers[0], address, source), source)  # finds its pair gone, and makes another
    for one in consumers:
        one.close()
    producer.close()


def test_a_consumer_keeps_so_many_pairs_and_ends_the_one_used_longest_ago() -> None:
    consumer, source = made(max_pairs=2), Source(2, 64_000)
    producers = [made() for _ in range(3)]
    for one in producers:
        check(fetch_all(consumer, one.publish("t", source, 60), source), source)
    settle(lambda: [len(pairs(p)) for p in producers] == [0, 1, 1])
    held = [consumer.fetch(p.address, "t", want(source.plan), soon()) for p in producers[1:]]
    with pytest.raises(TransportError, match="max_pairs"):
        consumer.fetch(producers[0].address, "t", want(source.plan), soon())
    for delivery in held:
        check(list(delivery), source)
    check(fetch_all(consumer, producers[0].address, source), source)
    for closing in (consumer, *producers):
        closing.close()


def test_both_sides_must_have_one_backend_and_two_gpus(producer: Nccl, monkeypatch: pytest.MonkeyPatch) -> None:
    address = producer.publish("t", Source(), 60)
    with raw_client(address) as say:
        assert "transport.nccl.backend" in detail(say(msg.Join(0, "nccl", "GPU-1")))
        monkeypatch.setattr(GlooBackend, "device", lambda self: "GPU-1")
        assert "use 'cuda_ipc'" in detail(say(msg.Join(0, "gloo", "GPU-1")))
    assert not pairs(producer)


def test_what_has_not_joined_takes_nothing(producer: Nccl) -> None:
    address = producer.publish("t", Source(), 60)
    with raw_client(address) as say:
        assert "has not joined" in detail(say(msg.Take(b"t" * TOKEN_BYTES, (64,))))
        say(msg.Leave(), answer=False)
        joined(say)
        assert "joined already" in detail(say(msg.Join(0, "gloo", "")))
    settle(lambda: not pairs(producer))  # nobody is there any more


def test_tcp_has_no_pairs() -> None:
    producer = Tcp(Tcp.Config())
    address = producer.publish("t", Source(), 60)
    with raw_client(address.replace("tcp:", "nccl:")) as say:
        for request in (msg.Join(0, "gloo", ""), msg.Take(b"", (1,)), msg.Leave()):
            assert "through the connection" in detail(say(request))
    producer.close()


def test_bodies_of_nobodys_fetch_are_zeros(producer: Nccl) -> None:
    address = producer.publish("t", Source(), 60)
    with raw_client(address) as say:
        pair = joined(say)
        say(msg.Take(b"t" * TOKEN_BYTES, (640, 0, 64)), answer=False)
        bodies = pair.room([640, 0, 64])
        assert pair.through(pair.post(bodies, lambda: None), lambda: None)
        assert not any(body.any() for body in bodies)
        pair.abort()


def test_a_take_of_other_sizes_than_announced_ends_the_pair(producer: Nccl) -> None:
    source = Source(3, 640)
    address = producer.publish("t", source, 60)
    with raw_client(address) as say, raw_client(address) as fetch:
        pair = joined(say)
        fetch(msg.Fetch(0, "t", tuple(source.plan), PEER, 2**20, 60.0))
        settle(lambda: carrier_of(producer)._tokens)
        (token,) = carrier_of(producer)._tokens
        assert "next are of" in detail(say(msg.Take(token, (64, 640))))
        assert not pairs(producer)
        pair.abort()


@pytest.mark.parametrize("sizes", [(MAX_TAKE_BYTES + 1,), (2**62, 2**62)])
def test_a_take_of_too_much_ends_the_pair(producer: Nccl, sizes: tuple[int, ...]) -> None:
    address = producer.publish("t", Source(), 60)
    with raw_client(address) as say:
        pair = joined(say)
        assert "at most" in detail(say(msg.Take(b"t" * TOKEN_BYTES, sizes)))
        assert not pairs(producer)
        pair.abort()


def test_a_consumer_that_takes_and_does_not_receive_is_bounded(producer: Nccl) -> None:
    address = producer.publish("t", Source(), 60)
    with raw_client(address) as say:
        assert isinstance(say(msg.Join(0, "gloo", "")), msg.Joined)  # and never comes
        for _ in range(MAX_JOBS):
            say(msg.Take(b"t" * TOKEN_BYTES, (64,)), answer=False)
        assert "on their way" in detail(say(msg.Take(b"t" * TOKEN_BYTES, (64,))))
        assert not pairs(producer)


def test_a_consumer_that_joins_and_does_not_come_is_given_up() -> None:
    producer = made(join_timeout=0.5)
    address = producer.publish("t", Source(), 60)
    with raw_client(address) as say:
        assert isinstance(say(msg.Join(0, "gloo", "")), msg.Joined)
        assert detail(say())
    assert not pairs(producer)
    producer.close()


def test_a_backend_that_cannot_open_fails_the_join_only(
    producer: Nccl, consumer: Nccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source()
    address = producer.publish("t", source, 60)
    with monkeypatch.context() as patch:
        patch.setattr(GlooBackend, "host", lambda self, bind: (_ for _ in ()).throw(OSError("no port is left")))
        with pytest.raises(PeerLost, match="no port is left"):
            fetch_all(consumer, address, source)
    check(fetch_all(consumer, address, source), source)


@pytest.mark.parametrize(
    "sent",
    [
        ["join", 0, "g" * 1000, ""],
        ["join", 0, "gloo"],
        ["join", -1, "gloo", ""],
        ["take", "text", [1]],
        ["take", b"t" * 65, [1]],
        ["take", b"t", [-1]],
        ["take", b"t", [1] * 257],
        ["leave", 1],
    ],
)
def test_malformed_requests(sent: list[object]) -> None:
    data = msgspec.msgpack.encode(sent)
    if sent[0] == "leave":  # more fields than known are a later version's
        assert msg.decode_request(data) == msg.Leave()
    else:
        with pytest.raises(FrameError, match="malformed"):
            msg.decode_request(data)


class Fake:
    """A producer that answers Fetch and Join with what it is given."""

    def __init__(self, fetch: list[list[bytes]], join: list[msg.Reply]) -> None:
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.rcvtimeo = 100
        self.address = f"nccl://127.0.0.1:{self._router.bind_to_random_port('tcp://127.0.0.1')}"
        self._answers = {msg.Fetch: fetch, msg.Join: [[msg.encode(reply)] for reply in join]}
        self._closing = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing:
            try:
                owner, request = self._router.recv_multipart()
            except zmq.Again:
                continue
            for parts in self._answers.get(type(msg.decode_request(request)), []):
                self._router.send_multipart([owner, *parts])

    def close(self) -> None:
        self._closing = True
        self._thread.join()
        self._context.destroy(linger=0)


def opened(*tokens: bytes) -> list[list[bytes]]:
    source = Source(2, 64)
    pieces = [
        [msg.encode(msg.Piece(0, i, 0, 64, bytes(source.sealed[i].head))), token] for i, token in enumerate(tokens)
    ]
    return [[msg.encode(msg.Opened(0, 2)), pack_header(source.header)], *pieces]


def invitation(port: int) -> msg.Joined:
    return msg.Joined(0, msgspec.msgpack.encode(Invite(port, "s")))


@pytest.mark.parametrize(
    ("tokens", "join", "error"),
    [
        ([], [msg.End(0, 0.0)], FrameError),
        ([], [msg.Joined(0, b"\xc1")], FrameError),
        ([], [invitation(0)], FrameError),
        ([], [invitation(2**40)], FrameError),
        ([], [msg.Failed(0, "refused", "go away")], TransportError),
        ([], [invitation(1)], KVServeError),
    ],
)
def test_hostile_answers_to_a_join(consumer: Nccl, tokens: list[bytes], join: Any, error: type[Exception]) -> None:
    fake = Fake(opened(*tokens), join)
    try:
        with pytest.raises(error):
            list(consumer.fetch(fake.address, "t", want(Source(2).plan), soon(5)))
        assert not consumer._pool._turns
    finally:
        fake.close()


@contextmanager
def silent(*tokens: bytes) -> Iterator[str]:
    """A producer that sends these tickets, opens its end of the pair, and then nothing."""
    invite, connect = GlooBackend(5.0).host("127.0.0.1")
    fake = Fake(opened(*tokens), [msg.Joined(0, invite)])
    there: list[Any] = []
    meeting = threading.Thread(target=lambda: there.append(connect(lambda: None)))
    meeting.start()
    try:
        yield fake.address
    finally:
        meeting.join()
        there[0].abort()
        fake.close()


@pytest.mark.parametrize("tokens", [[b"short"], [b"a" * TOKEN_BYTES, b"b" * TOKEN_BYTES], [b""]])
def test_hostile_tickets(consumer: Nccl, tokens: list[bytes]) -> None:
    with silent(*tokens) as address, pytest.raises(FrameError):
        list(consumer.fetch(address, "t", want(Source(2).plan), soon(5)))


def test_a_producer_that_says_one_thing_and_sends_nothing_meets_the_deadline(consumer: Nccl) -> None:
    with silent(b"t" * TOKEN_BYTES, b"t" * TOKEN_BYTES) as address, pytest.raises(TransferTimeout):
        list(consumer.fetch(address, "t", want(Source(2).plan), soon(0.5)))


def test_the_way_to_a_host() -> None:
    assert local_address("127.0.0.1", 5) == "127.0.0.1"
    with pytest.raises(TransportError, match="no way"):
        local_address("256.0.0.1", 5)


def test_what_was_announced_and_never_taken_is_forgotten_with_its_fetch(producer: Nccl) -> None:
    source = Source(5, 640)
    address = producer.publish("t", source, 60)
    with raw_client(address) as say:
        assert isinstance(say(msg.Fetch(0, "t", tuple(source.plan), PEER, 2**20, 60.0)), msg.Opened)
        settle(lambda: carrier_of(producer)._tokens)
        say(msg.Cancel(0), answer=False)
        settle(lambda: not carrier_of(producer)._tokens and not carrier_of(producer)._waiting)
