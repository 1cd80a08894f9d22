"""``nccl`` over Gloo: pairs of processes, bodies in the order asked for, lost and stopped peers, fetches given up."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvserve_core.errors import (
    IntegrityError,
    KVServeError,
    PeerLost,
    TransferCancelled,
    TransferTimeout,
    TransportError,
    UnavailableComponentError,
)
from kvserve_core.wire import Codebook
from kvserve_plugins.transports import _nccl_channel, _nccl_delivery
from kvserve_plugins.transports._nccl_carrier import PairCarrier
from kvserve_plugins.transports._nccl_channel import Channel
from kvserve_plugins.transports._nccl_pairs import Pair
from kvserve_plugins.transports.nccl import Nccl
from kvserve_plugins.transports.tcp import create_keys
from plugins.nccl_peers import BEAT_S, carrier_of, consume, made, pairs
from plugins.transport_checks import Remote, Source, check, fetch_all, remote_producer, settle, soon, threads, want


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    yield
    assert not threads()


@pytest.fixture
def consumer(tidy: None) -> Iterator[Nccl]:
    one = made()
    yield one
    one.close()


@pytest.fixture
def producer(tidy: None) -> Iterator[Nccl]:
    one = made()
    yield one
    one.close()


def pair_of(consumer: Nccl) -> Pair:
    (pair,) = consumer._pool._pairs.values()
    return pair


def remote(**source: Any) -> Any:
    return remote_producer({"backend": "gloo", "heartbeat": BEAT_S}, kind="nccl", **source)


def test_two_processes(consumer: Nccl) -> None:
    with remote(count=40, size=800_000) as there:
        assert there.address.startswith("nccl://127.0.0.1:")
        source = Source(40, 800_000)
        for _ in range(2):
            delivery = consumer.fetch(there.address, "t", want(source.plan), soon())
            got = list(delivery)
            check(got, source)
            assert delivery.stats.nbytes >= sum(s.nbytes for s in got)
            assert 0 < delivery.stats.link_s <= delivery.stats.seconds
        consumer.renew(there.address, "t", 100)
        consumer.release(there.address, "t", (0, 1), None)


def test_one_pair_for_all_fetches_of_two_processes(producer: Nccl, consumer: Nccl) -> None:
    sources = [Source(20, 100_000, seed=i) for i in range(6)]
    for i, source in enumerate(sources):
        address = producer.publish(f"t{i}", source, 60)
    failed: list[BaseException] = []

    def fetch(i: int) -> None:
        try:
            for _ in range(4):
                check(list(consumer.fetch(address, f"t{i}", want(sources[i].plan), soon())), sources[i])
        except BaseException as error:  # noqa: BLE001  # reported by the main thread
            failed.append(error)

    workers = [threading.Thread(target=fetch, args=(i,)) for i in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failed
    assert len(pairs(producer)) == len(consumer._pool._pairs) == 1
    assert pair_of(consumer).users == 0


def test_two_consumers_have_a_pair_each(producer: Nccl, consumer: Nccl) -> None:
    source = Source(6, 300_000)
    address = producer.publish("t", source, 60)
    other = made()
    first, second = (iter(c.fetch(address, "t", want(source.plan), soon())) for c in (consumer, other))
    check([next(first), *list(second), *list(first)][:1] + fetch_all(other, address, source, 1, 2, 3, 4, 5), source)
    assert len(pairs(producer)) == 2
    other.close()
    settle(lambda: len(pairs(producer)) == 1)
    check(fetch_all(consumer, address, source), source)


def test_a_fetch_that_brings_nothing_needs_no_pair(producer: Nccl, consumer: Nccl) -> None:
    source = Source(2)
    address = producer.publish("t", source, 60)
    nothing = _nccl_delivery.Selection((), want(source.plan).peer)
    assert list(consumer.fetch(address, "t", nothing, soon())) == []
    with pytest.raises(KVServeError):
        fetch_all(consumer, "nccl://127.0.0.1:1", source, seconds=1)
    assert not consumer._pool._pairs


def test_the_next_batch_is_under_way_while_one_is_worked_on(
    producer: Nccl, consumer: Nccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pair, "batch_bytes", lambda self, most: 200_000)
    source = Source(10, 100_000)
    delivery = consumer.fetch(producer.publish("t", source, 60), "t", want(source.plan), soon())
    got, iterator = [], iter(delivery)
    got.append(next(iterator))
    batches = delivery._batches
    settle(lambda: all(b.job.done.is_set() for b in batches))
    got += list(iterator)
    check(got, source)
    assert delivery._takes >= 3


def test_a_damaged_segment_is_noticed(consumer: Nccl) -> None:
    faulty, source = made(faults="corrupt:2"), Source(3, 64_000)
    got = fetch_all(consumer, faulty.publish("t", source, 30), source)
    book = Codebook(source.header)
    with pytest.raises(IntegrityError):
        [book.unseal(sealed) for sealed in got]
    faulty.close()


def test_the_bucket_counts_bodies(consumer: Nccl) -> None:
    slow, source = made(max_bandwidth="8Mbps"), Source(5, 40_000)
    delivery = consumer.fetch(slow.publish("t", source, 30), "t", want(source.plan), soon())
    check(list(delivery), source)
    assert delivery.stats.link_s >= 0.9 * 160_000 / 1e6  # a lower bound: the bucket holds tickets back, not the last
    slow.close()


def test_time_away_is_no_time_on_the_link(producer: Nccl, consumer: Nccl) -> None:
    source = Source(8, 100_000)
    delivery = consumer.fetch(producer.publish("t", source, 60), "t", want(source.plan), soon())
    for _ in delivery:
        time.sleep(0.05)
    assert delivery.stats.seconds < 0.2  # of the 0.4 in which the user slept


def test_keys_admit_and_others_are_refused(tmp_path: Any) -> None:
    create_keys(tmp_path / "keys")
    both, stranger, source = made(key_dir=tmp_path / "keys"), made(), Source(3, 200_000)
    address = both.publish("t", source, 30)
    check(fetch_all(both, address, source), source)
    with pytest.raises((PeerLost, TransferTimeout), match="key"):
        fetch_all(stranger, address, source, seconds=2)
    stranger.close()
    both.close()


def test_a_killed_producer_is_lost_long_before_the_deadline(consumer: Nccl) -> None:
    with remote(count=4, ready=False) as there:
        there.pipe.send((0,))
        delivery = iter(consumer.fetch(there.address, "t", want(Source(4).plan), soon(600)))
        next(delivery)
        there.process.kill()
        with pytest.raises(PeerLost):
            list(delivery)
        there.process.join()
        with pytest.raises(PeerLost):
            consumer.fetch(there.address, "t", want(Source(4).plan), soon(600))


def test_a_producer_that_dies_between_fetches_costs_its_pair(consumer: Nccl, producer: Nccl) -> None:
    source = Source(2)
    with remote(count=2) as there:
        check(fetch_all(consumer, there.address, source), source)
    check(fetch_all(consumer, producer.publish("t", source, 30), source), source)
    assert len(consumer._pool._pairs) == 1


def stop(there: Remote) -> None:
    os.kill(there.process.pid, signal.SIGSTOP)


def test_a_producer_that_hangs_is_lost_after_three_beats(consumer: Nccl) -> None:
    with remote(count=4, size=2_000_000) as there:
        source = Source(4, 2_000_000)
        check(fetch_all(consumer, there.address, source), source)
        pair = pair_of(consumer)
        stop(there)
        try:
            job = pair.take(b"t" * 16, [1_000_000])  # as a fetch would whose ticket came before
            settle(lambda: _failed(consumer), 20)  # whoever waits for the job looks
            settle(lambda: pair.channel.gone and isinstance(job.error, PeerLost))
        finally:
            os.kill(there.process.pid, signal.SIGCONT)


def test_a_deadline_ends_a_fetch_whose_bodies_do_not_come(consumer: Nccl, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, source = made(), Source(2, 64_000)
    address = producer.publish("t", source, 60)
    check(fetch_all(consumer, address, source), source)
    monkeypatch.setattr(PairCarrier, "_take", lambda *given: None)
    with pytest.raises(TransferTimeout):
        fetch_all(consumer, address, source, seconds=0.3)
    producer.close()


def test_a_batch_that_stalls_costs_its_pair_and_not_the_next_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_nccl_channel, "STALL_S", 0.3)
    consumer, producer, source = made(), made(), Source(2, 64_000)
    address = producer.publish("t", source, 60)
    with monkeypatch.context() as patch:
        patch.setattr(PairCarrier, "_take", lambda *given: None)
        with pytest.raises((TransferTimeout, PeerLost)):
            fetch_all(consumer, address, source)
    check(fetch_all(consumer, address, source), source)
    consumer.close()
    producer.close()


def test_a_killed_consumer_frees_its_pair(producer: Nccl) -> None:
    address = producer.publish("t", Source(40, 64_000), 60)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=consume, args=(address, theirs), daemon=True)
    process.start()
    theirs.close()
    assert ours.recv()
    (pair,) = pairs(producer).values()
    process.kill()
    process.join()
    settle(lambda: not pairs(producer) and pair.channel.gone, 20)
    ours.close()


def test_a_cancelled_fetch_leaves_the_pair_to_others(producer: Nccl, consumer: Nccl) -> None:
    source, other = Source(60, 400_000), Source(8, 400_000, seed=9)
    address = producer.publish("t", source, 60)
    producer.publish("o", other, 60)
    beside = iter(consumer.fetch(address, "o", want(other.plan), soon()))
    got = [next(beside)]
    for taken in (0, 1, 7):
        delivery = consumer.fetch(address, "t", want(source.plan), soon())
        iterator = iter(delivery)
        for _ in range(taken):
            next(iterator)
        delivery.close()
        with pytest.raises(TransferCancelled):
            list(iterator)
    channel = pair_of(consumer).channel
    check(got + list(beside), other)
    check(fetch_all(consumer, address, source), source)
    assert pair_of(consumer).channel is channel
    assert pair_of(consumer).users == 0


def test_a_fetch_that_is_closed_while_it_waits_for_bodies(
    producer: Nccl, consumer: Nccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(4, 64_000)
    address = producer.publish("t", source, 60)
    check(fetch_all(consumer, address, source), source)
    monkeypatch.setattr(PairCarrier, "_take", lambda *given: None)
    delivery = consumer.fetch(address, "t", want(source.plan), soon())
    threading.Timer(0.1, delivery.close).start()
    with pytest.raises(TransferCancelled):
        list(delivery)


def test_bodies_asked_for_after_a_withdrawal_are_not_taken_for_the_fetch(producer: Nccl, consumer: Nccl) -> None:
    source, other = Source(4, 64_000), Source(3, 64_000, seed=3)
    address = producer.publish("t", source, 60)
    producer.publish("o", other, 60)
    delivery = consumer.fetch(address, "t", want(source.plan), soon())
    settle(lambda: delivery._here())
    producer.withdraw("t", "no longer wanted")
    settle(lambda: not carrier_of(producer)._tokens)
    with pytest.raises(PeerLost, match="no longer wanted"):
        list(delivery)
    channel = pair_of(consumer).channel
    check(list(consumer.fetch(address, "o", want(other.plan), soon())), other)
    assert pair_of(consumer).channel is channel


def test_closing_the_consumer_ends_fetches_under_way(producer: Nccl) -> None:
    consumer, source = made(), Source(4, 64_000, ready=False)
    address = producer.publish("t", source, 60)
    source.finish(0)
    delivery = iter(consumer.fetch(address, "t", want(source.plan), soon()))
    next(delivery)
    threading.Timer(0.1, consumer.close).start()
    with pytest.raises(TransferCancelled):
        list(delivery)
    consumer.close()
    settle(lambda: not pairs(producer))


def test_closing_the_producer_ends_fetches_that_wait_for_bodies(
    consumer: Nccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, source = made(), Source(4, 64_000)
    address = producer.publish("t", source, 60)
    check(fetch_all(consumer, address, source), source)
    monkeypatch.setattr(PairCarrier, "_take", lambda *given: None)
    threading.Timer(0.2, producer.close).start()
    with pytest.raises(PeerLost):
        fetch_all(consumer, address, source)
    producer.close()


def test_a_pair_that_fails_is_made_anew(producer: Nccl, consumer: Nccl) -> None:
    source = Source(4, 64_000)
    address = producer.publish("t", source, 60)
    for _ in range(3):
        check(fetch_all(consumer, address, source), source)
        (pair,) = pairs(producer).values()
        pair.channel.fail(PeerLost("a library that failed"))
        settle(lambda: _failed(consumer))


def _failed(consumer: Nccl) -> bool:
    try:
        pair_of(consumer).look()
    except PeerLost as error:
        return bool(str(error))
    return False


def test_a_channel_whose_library_breaks_fails_alone() -> None:
    def broken(check: Any) -> Any:
        raise RuntimeError("no such device")

    channel = Channel(broken)
    assert channel.ready.wait(10)
    with pytest.raises(PeerLost, match="no such device"):
        channel.submit([b""])
    with pytest.raises(PeerLost):
        channel.room([1])
    channel.close()


def test_a_forked_child_makes_pairs_of_its_own(producer: Nccl, consumer: Nccl) -> None:
    source = Source()
    address = producer.publish("t", source, 60)
    check(fetch_all(consumer, address, source), source)
    parents = pair_of(consumer)
    consumer._pool._pid = consumer._links._pid = -1  # what a child sees
    check(fetch_all(consumer, address, source), source)
    assert pair_of(consumer) is not parents
    parents.close(TransferCancelled("the parent would"))
    for link in [link for links in consumer._links._parents.values() for link in links]:
        link.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu_the_default_backend_says_what_to_use() -> None:
    one = Nccl(Nccl.Config())
    with pytest.raises(UnavailableComponentError, match="use 'tcp'"):
        one.publish("t", Source(), 5)
    one.close()


def test_gloo_is_not_opened_to_a_network_unasked(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="'gloo'"):
        Nccl.Config(backend="gloo", bind="10.0.0.5", key_dir=tmp_path)
    Nccl.Config(backend="nccl", bind="10.0.0.5", key_dir=tmp_path)


def test_addresses_of_tcp_are_not_taken(consumer: Nccl) -> None:
    with pytest.raises(TransportError, match="'nccl'"):
        consumer.fetch("tcp://127.0.0.1:5", "t", want(Source().plan), soon(1))
