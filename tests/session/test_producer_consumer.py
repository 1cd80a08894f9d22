"""Producer and Consumer over a fake paged engine: every layout, split and failure that adapters must survive."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fake_engine import STALE, FakeEngine, collect, decision, dense, hybrid, mla, wait_for
from kvserve_core.errors import (
    ConfigError,
    IntegrityError,
    LeaseLost,
    StoreFull,
    TransferCancelled,
    TransferTimeout,
    TransportError,
    Unacceptable,
)
from kvserve_core.pipeline import Pipeline
from kvserve_core.policy import Outcome
from kvserve_core.profile import LOSSLESS_PIPELINE, RAW_PIPELINE, PipelineSpec
from kvserve_core.registry import default_registry
from kvserve_core.session import Consumer, Failed, Freed, Loaded, LoadFailed, Producer
from kvserve_core.spec import KVSpec, Region, Shard, whole
from kvserve_core.transport import Endpoint, Locator, Transport
from kvserve_plugins.codecs.zstd import Zstd

LOSSY = PipelineSpec.model_validate(
    {
        "planes": {
            "*": {
                "transforms": ["hadamard"],
                "quantizer": {"name": "uniform", "configuration": {"levels": 16, "axis": "token_head"}},
                "codec": "zstd",
            }
        },
        "layer_block": 2,
    }
)
JOINT = LOSSY.model_copy(update={"planes": {"kv": LOSSY.planes["*"]}})
SPECS = {"raw": RAW_PIPELINE, "lossless": LOSSLESS_PIPELINE, "lossy": LOSSY, "joint": JOINT}


@dataclass
class Side:
    """A rank with its engine, transport and session object."""

    engine: FakeEngine
    transport: Transport
    session: Producer | Consumer


class World:
    """Prefill and decode engines of any tensor-parallel sizes, joined by in-process transports."""

    def __init__(self) -> None:
        self._closing: list[object] = []

    def producers(
        self, kv: KVSpec, size: int = 1, names: tuple[str, ...] = ("raw", "lossless"), **kw: object
    ) -> list[Side]:
        return [self._producer(kv, Shard(whole(kv).layers, r, size), names, **kw) for r in range(size)]

    def _producer(self, kv: KVSpec, shard: Shard, names: tuple[str, ...], block_size: int = 16, **kw: object) -> Side:
        engine = FakeEngine(kv, shard, block_size)
        pipelines = {n: Pipeline.build(SPECS[n], kv, shard) for n in names}
        transport = default_registry().create("transport", "memory")
        producer = Producer(pipelines, transport, engine.gather, **kw)
        self._closing += [producer, transport]
        return Side(engine, transport, producer)

    def consumers(self, kv: KVSpec, size: int = 1, block_size: int = 16) -> list[Side]:
        return [self._consumer(kv, Shard(whole(kv).layers, r, size), block_size) for r in range(size)]

    def _consumer(self, kv: KVSpec, shard: Shard, block_size: int) -> Side:
        engine = FakeEngine(kv, shard, block_size)
        transport = default_registry().create("transport", "memory")
        consumer = Consumer(kv, shard, lambda _: transport, engine.scatter)
        self._closing += [consumer, transport]
        return Side(engine, transport, consumer)

    def close(self) -> None:
        for thing in self._closing:
            thing.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def send(
    sides: list[Side], total: int, profile: str, chunks: tuple[range, ...] | None = None, tid: str = "t"
) -> Locator:
    """Open, prefill in chunks and publish on every rank."""
    endpoints = []
    for side in sides:
        side.engine.allocate(tid, total)
        endpoints.append(side.session.open(tid, total, decision(profile)))
        for chunk in chunks or (range(total),):
            side.engine.prefill(tid, chunk)
            side.session.ready(tid, chunk)
    return Locator(tid, total, tuple(endpoints), profile)


def load(sides: list[Side], loc: Locator, tokens: range | None = None, seconds: float = 20.0) -> list[object]:
    """Fetch on every rank; returns one event a rank."""
    tokens = tokens or range(loc.num_tokens)
    for side in sides:
        side.engine.allocate(loc.transfer_id, loc.num_tokens)
        side.session.fetch(loc, tokens, time.monotonic() + seconds)
    return [wait_for(side.session.poll, (Loaded, LoadFailed)) for side in sides]


@pytest.mark.parametrize("kv", [dense(), dense(heads=3), mla(), hybrid()], ids=["dense", "3-heads", "mla", "hybrid"])
@pytest.mark.parametrize("profile", ["raw", "lossless"])
@pytest.mark.parametrize("total", [1, 255, 256, 700])
def test_lossless_transfer_is_bit_exact(world: World, kv: KVSpec, profile: str, total: int) -> None:
    prefill, decode = world.producers(kv), world.consumers(kv)
    (event,) = load(decode, send(prefill, total, profile))
    assert isinstance(event, Loaded), event
    assert decode[0].engine.holds("t", range(total), total)
    outcome = wait_for(prefill[0].session.poll, Outcome)
    assert outcome.ok
    assert outcome.wire_bytes > 0
    assert outcome.encode_s > 0
    assert outcome.decode_s > 0


@pytest.mark.parametrize("blocks", [(16, 16), (16, 64), (64, 16)])
def test_block_sizes_need_not_match(world: World, blocks: tuple[int, int]) -> None:
    kv = dense()
    prefill, decode = world.producers(kv, block_size=blocks[0]), world.consumers(kv, block_size=blocks[1])
    (event,) = load(decode, send(prefill, 300, "lossless"))
    assert isinstance(event, Loaded)
    assert decode[0].engine.holds("t", range(300), 300)


@pytest.mark.parametrize(("p", "d"), [(1, 2), (2, 1), (2, 2), (4, 1), (1, 4), (4, 2), (2, 4), (4, 4)])
def test_any_tensor_parallel_remap(world: World, p: int, d: int) -> None:
    kv = dense(heads=2)  # with four ranks each head is held twice
    prefill, decode = world.producers(kv, p), world.consumers(kv, d)
    events = load(decode, send(prefill, 300, "lossless"))
    assert all(isinstance(e, Loaded) for e in events), events
    assert all(side.engine.holds("t", range(300), 300) for side in decode)


def test_head_local_chains_give_the_same_bytes_on_every_tensor_parallel_size(world: World) -> None:
    kv = dense(heads=4)
    bodies = {}
    for size in (1, 2, 4):
        found = {}
        for rank in range(size):
            shard = Shard(whole(kv).layers, rank, size)
            engine = FakeEngine(kv, shard)
            engine.allocate("t", 300)
            engine.prefill("t", range(300))
            pipeline = Pipeline.build(LOSSY, kv, shard)
            planned = list(pipeline.regions(range(300), 300))
            segments = pipeline.encode([(p, engine.gather("t", p.at)) for p in planned])
            found |= {s.at: (s.chain, s.meta, bytes(s.body)) for s in segments}
        bodies[size] = found
    assert bodies[1] == bodies[2] == bodies[4]


@pytest.mark.parametrize(
    "chunks",
    [
        tuple(range(i, min(i + 64, 600)) for i in range(0, 600, 64)),
        (range(400, 600), range(0, 150), range(150, 400)),
        (range(0, 1), range(1, 599), range(599, 600)),
    ],
    ids=["64", "out-of-order", "ragged"],
)
def test_bytes_do_not_depend_on_prefill_chunking(world: World, chunks: tuple[range, ...]) -> None:
    kv = hybrid()
    prefill = world.producers(kv, names=("raw", "lossy"))
    send(prefill, 600, "lossy", tid="whole")
    send(prefill, 600, "lossy", chunks, tid="chunked")
    collect(prefill[0].session.poll, Freed, 2)
    sources = [prefill[0].session._sources[t] for t in ("whole", "chunked")]
    assert sources[0].plan == sources[1].plan
    first, second = ([_contents(s, i) for i in range(len(s.plan))] for s in sources)
    assert first == second


def _contents(source: object, index: int) -> tuple[bytes, bytes]:
    from kvserve_core.wire import Codebook

    segment = Codebook(source.header).unseal(source.get(index, time.monotonic()))
    return segment.meta, bytes(segment.body)


def test_suffix_fetch_leaves_earlier_blocks_alone(world: World) -> None:
    kv = dense()
    prefill, decode = world.producers(kv), world.consumers(kv)
    (event,) = load(decode, send(prefill, 700, "lossless"), range(400, 700))
    assert isinstance(event, Loaded)
    engine = decode[0].engine
    assert engine.holds("t", range(400, 700), 700)
    assert min(at.start for at in engine.writes) == 400
    group = kv.groups[0]
    before = engine.gather("t", engine.region(group, group.planes[0], range(400)))
    assert bool((before == STALE).all())
    assert event.outcome.wire_bytes < 0.6 * 700 * kv.token_bytes()


@pytest.mark.parametrize("profile", ["lossy", "joint"])
def test_lossy_profiles_stay_within_their_error(world: World, profile: str) -> None:
    kv = dense()
    prefill, decode = world.producers(kv, names=("raw", profile)), world.consumers(kv)
    (event,) = load(decode, send(prefill, 520, profile))
    assert isinstance(event, Loaded), event
    for held, true in decode[0].engine.pairs("t", range(520), 520):
        error = (held.float() - true.float()).square().mean() / true.float().square().mean()
        assert 0 < error < 0.01
        assert torch.equal(held[:, :, :4], true[:, :, :4])  # sinks travel raw
    assert event.outcome.wire_bytes < 0.4 * event.outcome.raw_bytes


def test_stale_slots_never_travel(world: World) -> None:
    """The last block's unused tail holds another request's values; NaN there would poison a channel's range."""
    kv = dense()
    prefill, decode = world.producers(kv, names=("lossy",)), world.consumers(kv)
    for cache in prefill[0].engine.caches.values():
        cache.fill_(float("nan"))
    (event,) = load(decode, send(prefill, 250, "lossy"))
    assert isinstance(event, Loaded)
    assert all(bool(held.isfinite().all()) for held, _ in decode[0].engine.pairs("t", range(250), 250))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_values_are_escaped_losslessly(world: World, bad: float) -> None:
    kv = dense()
    prefill, decode = world.producers(kv, names=("lossy",)), world.consumers(kv)
    side = prefill[0]
    side.engine.allocate("t", 300)
    endpoint = side.session.open("t", 300, decision("lossy"))
    side.engine.prefill("t", range(300))
    slot = side.engine._slots("t", side.engine.region(kv.groups[0], kv.groups[0].planes[0], range(20, 21)))
    side.engine.caches[0, "k", 1].flatten(0, 1)[slot, 0, 3] = bad
    side.session.ready("t", range(300))
    (event,) = load(decode, Locator("t", 300, (endpoint,), "lossy"))
    assert isinstance(event, Loaded)
    at = side.engine.region(kv.groups[0], kv.groups[0].planes[0], range(256))
    sent, held = side.engine.gather("t", at), decode[0].engine.gather("t", at)
    assert torch.equal(sent[:2, 0, 4:].nan_to_num(9), held[:2, 0, 4:].nan_to_num(9))  # its segment went raw
    assert bool(held[2:].isfinite().all())


def test_many_prefills_to_many_decodes(world: World) -> None:
    kv = dense()
    prefills = [world.producers(kv)[0] for _ in range(3)]
    decodes = [world.consumers(kv)[0] for _ in range(2)]
    locs = [send([prefills[i % 3]], 270 + i, "lossless", tid=f"t{i}") for i in range(9)]
    for i, loc in enumerate(locs):
        decodes[i % 2].engine.allocate(loc.transfer_id, loc.num_tokens)
        decodes[i % 2].session.fetch(loc, range(loc.num_tokens), time.monotonic() + 20)
    collect(decodes[0].session.poll, Loaded, 5)
    collect(decodes[1].session.poll, Loaded, 4)
    for i, loc in enumerate(locs):
        assert decodes[i % 2].engine.holds(loc.transfer_id, range(loc.num_tokens), loc.num_tokens)


def test_segments_stream_while_prefill_goes_on(world: World) -> None:
    """A fetch that starts before prefill ends gets the first cell before the last one is final."""
    kv = dense()
    prefill, decode = world.producers(kv), world.consumers(kv)
    producer, consumer = prefill[0], decode[0]
    producer.engine.allocate("t", 512)
    loc = Locator("t", 512, (producer.session.open("t", 512, decision("raw")),), "raw")
    producer.engine.prefill("t", range(256))
    producer.session.ready("t", range(256))
    consumer.engine.allocate("t", 512)
    consumer.session._batch_bytes = 1
    consumer.session.fetch(loc, range(512), time.monotonic() + 20)
    until = time.monotonic() + 20
    while not consumer.engine.writes and time.monotonic() < until:
        time.sleep(0.002)
    assert consumer.engine.writes
    assert max(at.stop for at in consumer.engine.writes) == 256
    producer.engine.prefill("t", range(256, 512))
    producer.session.ready("t", range(256, 512))
    assert isinstance(wait_for(consumer.session.poll, (Loaded, LoadFailed)), Loaded)


def test_known_peer_that_cannot_decode_is_refused_at_open(world: World) -> None:
    kv = dense()
    prefill, decode = world.producers(kv, names=("raw", "lossy")), world.consumers(kv)
    peer = decode[0].session.peer
    reads = {k: v for k, v in peer.reads.items() if k != "codec:zstd"}
    poor = type(peer)(peer.wire, reads, peer.device, peer.fingerprint, peer.shard)
    with pytest.raises(Unacceptable, match="codec:zstd@1") as caught:
        prefill[0].session.open("t", 10, decision("lossy"), poor)
    assert caught.value.stages == ("codec:zstd@1",)
    prefill[0].session.open("t", 10, decision("raw"), poor)


def test_unknown_peer_that_cannot_decode_gets_a_typed_refusal(world: World) -> None:
    kv = dense()
    prefill, decode = world.producers(kv, names=("raw", "lossy")), world.consumers(kv)
    consumer = decode[0].session
    del consumer.peer.reads["codec:zstd"]
    (event,) = load(decode, send(prefill, 300, "lossy"))
    assert isinstance(event, LoadFailed)
    assert isinstance(event.error, Unacceptable)
    assert event.valid == range(0)
    counted = consumer.counters.snapshot()
    assert (counted["fallback_codec"], counted["fallback_recompute"]) == (1, 1)


def test_another_models_cache_is_refused(world: World) -> None:
    prefill, decode = world.producers(dense(dim=32)), world.consumers(dense(dim=64))
    (event,) = load(decode, send(prefill, 300, "raw"))
    assert isinstance(event, LoadFailed)
    assert not decode[0].engine.writes
    assert "fallback_codec" not in decode[0].session.counters.snapshot()  # no other codec would do


def test_missing_rank_is_named(world: World) -> None:
    kv = dense(heads=4)
    prefill, decode = world.producers(kv, 2), world.consumers(kv)
    loc = send(prefill, 300, "raw")
    (event,) = load(decode, Locator("t", 300, loc.endpoints[:1], "raw"))
    assert isinstance(event, LoadFailed)
    assert "head 2" in str(event.error)


def test_corruption_is_seen_and_nothing_bad_is_scattered(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = dense()
    prefill, decode = world.producers(kv), world.consumers(kv)
    loc = send(prefill, 700, "raw")
    wait_for(prefill[0].session.poll, Freed)
    source = prefill[0].session._sources["t"]
    victim = next(i for i, at in enumerate(source.plan) if at.start == 512)
    body = bytearray(source._sealed[victim].body)
    body[100] ^= 1
    source._sealed[victim] = type(source._sealed[victim])(victim, source._sealed[victim].head, body)
    decode[0].session._batch_bytes = 1
    (event,) = load(decode, loc)
    assert isinstance(event, LoadFailed)
    assert isinstance(event.error, IntegrityError)
    assert "tokens 512-700" in str(event.error) or "segment" in str(event.error)
    assert event.valid == range(0, 512)
    assert decode[0].engine.holds("t", range(512), 512)


def test_deadline_ends_a_fetch_whose_producer_never_finishes(world: World) -> None:
    kv = dense()
    prefill, decode = world.producers(kv), world.consumers(kv)
    loc = send(prefill, 512, "raw", (range(256),))
    (event,) = load(decode, loc, seconds=0.4)
    assert isinstance(event, LoadFailed)
    assert isinstance(event.error, TransferTimeout)
    assert event.valid == range(0, 256)


def test_other_requests_go_on_while_one_hangs(world: World) -> None:
    kv = dense()
    prefill, decode = world.producers(kv), world.consumers(kv)
    hung = send(prefill, 512, "raw", (range(256),), tid="hung")
    good = send(prefill, 300, "raw", tid="good")
    for loc in (hung, good):
        decode[0].engine.allocate(loc.transfer_id, loc.num_tokens)
        decode[0].session.fetch(loc, range(loc.num_tokens), time.monotonic() + 3)
    first = wait_for(decode[0].session.poll, (Loaded, LoadFailed))
    assert (first.transfer_id, type(first)) == ("good", Loaded)
    second = wait_for(decode[0].session.poll, (Loaded, LoadFailed))
    assert (second.transfer_id, type(second)) == ("hung", LoadFailed)


def test_abort_reaches_the_consumer_and_frees_the_producer(world: World) -> None:
    kv = dense()
    prefill, decode = world.producers(kv), world.consumers(kv)
    loc = send(prefill, 512, "raw", (range(256),))
    decode[0].engine.allocate("t", 512)
    decode[0].session.fetch(loc, range(512), time.monotonic() + 20)
    time.sleep(0.05)
    prefill[0].session.abort("t", "client went away")
    event = wait_for(decode[0].session.poll, (Loaded, LoadFailed))
    assert isinstance(event, LoadFailed)
    failed = wait_for(prefill[0].session.poll, Failed)
    assert failed.reason == "client went away"
    assert prefill[0].session.budget.held_bytes == 0
    prefill[0].session.ready("t", range(256, 512))  # late tokens of an aborted request are ignored


def test_cancel_scatters_nothing_afterwards(world: World) -> None:
    kv = dense()
    prefill, decode = world.producers(kv), world.consumers(kv)
    loc = send(prefill, 512, "raw", (range(256),))
    consumer = decode[0]
    consumer.engine.allocate("t", 512)
    consumer.session.fetch(loc, range(512), time.monotonic() + 20)
    consumer.session.cancel("t")
    prefill[0].engine.prefill("t", range(256, 512))
    prefill[0].session.ready("t", range(256, 512))
    event = wait_for(consumer.session.poll, (Loaded, LoadFailed))
    assert isinstance(event, LoadFailed)
    assert isinstance(event.error, TransferCancelled)
    written = len(consumer.engine.writes)
    time.sleep(0.05)
    assert len(consumer.engine.writes) == written


def test_a_gather_that_raises_fails_only_its_request(world: World) -> None:
    kv = dense()
    prefill, decode = world.producers(kv), world.consumers(kv)
    side = prefill[0]
    side.session.open("bad", 300, decision("raw"))
    side.session.ready("bad", range(300))  # no blocks were allocated: gather raises
    failed = wait_for(side.session.poll, Failed)
    assert failed.transfer_id == "bad"
    assert "KeyError" in failed.reason
    (event,) = load(decode, send(prefill, 300, "raw", tid="good"))
    assert isinstance(event, Loaded)


def test_a_chain_that_fails_falls_back_to_raw(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = dense()
    prefill, decode = world.producers(kv, names=("lossy",)), world.consumers(kv)
    from kvserve_plugins.quantizers.uniform import Uniform

    def explode(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Uniform, "encode", explode)
    (event,) = load(decode, send(prefill, 300, "lossy"))
    assert isinstance(event, Loaded)
    assert decode[0].engine.holds("t", range(300), 300)
    assert prefill[0].session.counters.snapshot()["fallback_raw"] > 0


def test_a_codec_that_raises_what_it_likes_falls_back_to_raw(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = dense()
    prefill, decode = world.producers(kv, names=("lossy",)), world.consumers(kv)

    def explode(*_: object) -> None:
        raise KeyError("a codec's own")

    monkeypatch.setattr(Zstd, "encode", explode)
    assert isinstance(load(decode, send(prefill, 300, "lossy"))[0], Loaded)
    assert decode[0].engine.holds("t", range(300), 300)
    assert prefill[0].session.counters.snapshot()["fallback_raw"] > 0


def test_who_asks_to_exit_in_the_encode_thread_fails_one_transfer(world: World) -> None:
    kv = dense()
    prefill, decode = world.producers(kv), world.consumers(kv)

    class Exits:
        def synchronize(self) -> None:
            raise SystemExit(1)

    prefill[0].session.open("bad", 300, decision("raw"))
    prefill[0].session.ready("bad", range(300), Exits())
    assert "SystemExit" in wait_for(prefill[0].session.poll, Failed).reason
    assert isinstance(load(decode, send(prefill, 300, "raw", tid="good"))[0], Loaded)


def test_published_bytes_are_bounded(world: World) -> None:
    kv = dense()
    prefill, decode = world.producers(kv, published_bytes_max=300 * kv.token_bytes() + 200_000), world.consumers(kv)
    producer = prefill[0].session
    first = send(prefill, 300, "raw", tid="first")
    with pytest.raises(StoreFull, match="'published_bytes_max'"):
        producer.open("second", 300, decision("raw"))
    assert isinstance(load(decode, first)[0], Loaded)
    wait_for(producer.poll, Outcome)
    assert isinstance(load(decode, send(prefill, 300, "raw", tid="second"))[0], Loaded)


def test_interleaved_chunked_prefills_share_a_budget(world: World) -> None:
    kv = dense()
    prefill, decode = world.producers(kv, published_bytes_max=3 * 600 * kv.token_bytes()), world.consumers(kv)
    side = prefill[0]
    locs = []
    for tid in ("a", "b", "c"):
        side.engine.allocate(tid, 600)
        locs.append(Locator(tid, 600, (side.session.open(tid, 600, decision("lossless")),), "lossless"))
    for start in range(0, 600, 150):
        for tid in ("a", "b", "c"):
            side.engine.prefill(tid, range(start, start + 150))
            side.session.ready(tid, range(start, start + 150))
    for loc in locs:
        assert isinstance(load(decode, loc)[0], Loaded)
    collect(side.session.poll, Outcome, 3)
    assert side.session.budget.held_bytes == 0


def test_an_id_can_be_used_again_at_once(world: World) -> None:
    kv = dense()
    prefill, decode = world.producers(kv), world.consumers(kv)
    send(prefill, 300, "raw", (range(256),))
    prefill[0].session.abort("t", "client went away")
    loc = send(prefill, 300, "raw")
    failed = wait_for(prefill[0].session.poll, Failed)
    assert failed.reason == "client went away"
    assert isinstance(load(decode, loc)[0], Loaded)
    assert wait_for(prefill[0].session.poll, (Outcome, Failed)).ok


def test_an_abort_while_encoding_leaves_no_bytes_reserved(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = dense()
    side = world.producers(kv)[0]
    inside, go_on = threading.Event(), threading.Event()

    def slow(transfer_id: str, at: Region) -> torch.Tensor:
        inside.set()
        assert go_on.wait(20)
        return side.engine.gather(transfer_id, at)

    monkeypatch.setattr(side.session._encoding, "_gather", slow)
    send([side], 300, "raw")
    assert inside.wait(20)
    side.session.abort("t", "client went away")
    go_on.set()
    events = collect(side.session.poll, (Failed, Freed), 2)
    assert sorted(type(e).__name__ for e in events) == ["Failed", "Freed"]
    send([side], 300, "raw", tid="next")
    wait_for(side.session.poll, Freed)
    assert 0 < side.session.budget.held_bytes < 300 * kv.token_bytes() + 100_000


@pytest.mark.parametrize(("p", "d"), [(4, 1), (2, 2), (1, 4)])
def test_every_producer_rank_is_released(world: World, p: int, d: int) -> None:
    """Also a replica that no consumer needed: with one latent head, four ranks hold the same."""
    kv = mla()
    prefill, decode = world.producers(kv, p), world.consumers(kv, d)
    assert all(isinstance(e, Loaded) for e in load(decode, send(prefill, 300, "raw")))
    for side in prefill:
        assert wait_for(side.session.poll, (Outcome, Failed)).ok
        assert side.session.budget.held_bytes == 0


def test_a_full_prefix_hit_releases_without_fetching(world: World) -> None:
    kv = dense()
    prefill, decode = world.producers(kv), world.consumers(kv)
    loc = send(prefill, 300, "raw")
    wait_for(prefill[0].session.poll, Freed)
    decode[0].session.release(loc)
    assert wait_for(prefill[0].session.poll, (Outcome, Failed)).ok


def test_an_unfinished_prefill_outlives_its_lease(world: World) -> None:
    kv = dense()
    prefill, decode = world.producers(kv, lease_s=0.2), world.consumers(kv)
    loc = send(prefill, 512, "raw", (range(256),))
    time.sleep(0.5)
    assert not [e for e in prefill[0].session.poll() if isinstance(e, Failed)]
    prefill[0].engine.prefill("t", range(256, 512))
    prefill[0].session.ready("t", range(256, 512))
    assert isinstance(load(decode, loc)[0], Loaded)


def test_a_suffix_fetch_reports_its_own_bytes(world: World) -> None:
    kv = dense()
    prefill, decode = world.producers(kv), world.consumers(kv)
    load(decode, send(prefill, 1024, "raw"), range(768, 1024))
    outcome = wait_for(prefill[0].session.poll, Outcome)
    assert outcome.raw_bytes == 256 * kv.token_bytes()
    assert 0.9 < outcome.raw_bytes / outcome.wire_bytes < 1.0


def test_cancel_ends_a_fetch_that_waits(world: World) -> None:
    kv = dense()
    prefill, decode = world.producers(kv), world.consumers(kv)
    loc = send(prefill, 512, "raw", (range(256),))
    decode[0].engine.allocate("t", 512)
    decode[0].session.fetch(loc, range(512), time.monotonic() + 600)
    time.sleep(0.1)
    decode[0].session.cancel("t")
    prefill[0].engine.prefill("t", range(256, 512))
    prefill[0].session.ready("t", range(256, 512))
    event = wait_for(decode[0].session.poll, (Loaded, LoadFailed))
    assert isinstance(event, LoadFailed)
    assert isinstance(event.error, TransferCancelled)


def test_many_stuck_fetches_do_not_starve_another(world: World) -> None:
    kv = dense()
    prefill, decode = world.producers(kv), world.consumers(kv)
    for i in range(12):
        stuck = send(prefill, 512, "raw", (range(256),), tid=f"stuck{i}")
        decode[0].engine.allocate(stuck.transfer_id, 512)
        decode[0].session.fetch(stuck, range(512), time.monotonic() + 3)
    good = send(prefill, 300, "raw", tid="good")
    decode[0].engine.allocate("good", 300)
    decode[0].session.fetch(good, range(300), time.monotonic() + 20)
    first = wait_for(decode[0].session.poll, (Loaded, LoadFailed))
    assert (first.transfer_id, type(first)) == ("good", Loaded)


def test_a_stage_that_raises_costs_only_its_segment(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = dense()
    prefill, decode = world.producers(kv, names=("lossy",)), world.consumers(kv)
    from kvserve_plugins.quantizers.uniform import Uniform

    encode = Uniform.encode

    def sometimes(self: Uniform, x: torch.Tensor, at: Region) -> object:
        if at.plane == "k" and at.heads == (0,):
            raise KeyError("a third party's bug")
        return encode(self, x, at)

    monkeypatch.setattr(Uniform, "encode", sometimes)
    (event,) = load(decode, send(prefill, 300, "lossy"))
    assert isinstance(event, Loaded)
    (k_held, k_true), (v_held, v_true) = decode[0].engine.pairs("t", range(300), 300)
    assert torch.equal(k_held[:, 0], k_true[:, 0])
    assert not torch.equal(k_held[:, 1], k_true[:, 1])
    assert not torch.equal(v_held[:, 0], v_true[:, 0])


def test_expired_lease_fails_typed_on_both_sides(world: World) -> None:
    kv = dense()
    prefill, decode = world.producers(kv, lease_s=0.15), world.consumers(kv)
    loc = send(prefill, 300, "raw")
    failed = wait_for(prefill[0].session.poll, Failed)
    assert "lease" in failed.reason
    assert prefill[0].session.budget.held_bytes == 0
    (event,) = load(decode, loc)
    assert isinstance(event, LoadFailed)
    assert isinstance(event.error, LeaseLost)


def test_bad_requests_are_refused_with_the_reason(world: World) -> None:
    kv = dense()
    producer, consumer = world.producers(kv)[0].session, world.consumers(kv)[0].session
    with pytest.raises(ConfigError, match="unknown profile 'lossles'; did you mean 'lossless'"):
        producer.open("t", 10, decision("lossles"))
    with pytest.raises(ConfigError, match="at least 1"):
        producer.open("t", 0, decision("raw"))
    loc = Locator("t", 10, (Endpoint("memory://nowhere", whole(kv)),), "raw")
    with pytest.raises(ConfigError, match="tokens 5-11 of a transfer of 10"):
        consumer.fetch(loc, range(5, 11), time.monotonic() + 1)


def test_an_expired_fetch_that_never_got_a_thread_is_reported(world: World) -> None:
    kv = dense()
    prefill = world.producers(kv)
    side = world.consumers(kv)[0]
    slow = Consumer(kv, whole(kv), lambda _: side.transport, side.engine.scatter, threads=1)
    stuck = send(prefill, 512, "raw", (range(256),), tid="stuck")
    good = send(prefill, 300, "raw", tid="good")
    try:
        for loc, seconds in ((stuck, 3.0), (good, 0.2)):
            side.engine.allocate(loc.transfer_id, loc.num_tokens)
            slow.fetch(loc, range(loc.num_tokens), time.monotonic() + seconds)
        first = wait_for(slow.poll, (Loaded, LoadFailed), 2.5)
        assert (first.transfer_id, type(first)) == ("good", LoadFailed)
        assert isinstance(first.error, TransferTimeout)
    finally:
        slow.close()


def test_what_could_not_be_written_did_not_arrive(world: World) -> None:
    kv = dense()
    side = world.consumers(kv)[0]

    def fill(name: str, at: Region, x: Tensor) -> None:
        if at.stop > 256:
            raise RuntimeError("no room for these")
        side.engine.scatter(name, at, x)

    consumer = Consumer(kv, whole(kv), lambda _: side.transport, fill)
    side.engine.allocate("t", 300)
    try:
        consumer.fetch(send(world.producers(kv), 300, "raw"), range(300), time.monotonic() + 20)
        event = wait_for(consumer.poll, (Loaded, LoadFailed))
    finally:
        consumer.close()
    assert isinstance(event, LoadFailed)
    assert event.valid == range(256)
    assert side.engine.holds("t", range(256), 300)


def test_an_exit_in_a_scatter_still_ends_the_fetch(world: World) -> None:
    kv = dense()
    side = world.consumers(kv)[0]

    def leave(*_: object) -> None:
        raise SystemExit(3)

    consumer = Consumer(kv, whole(kv), lambda _: side.transport, leave)
    try:
        consumer.fetch(send(world.producers(kv), 300, "raw"), range(300), time.monotonic() + 20)
        event = wait_for(consumer.poll, (Loaded, LoadFailed))
        assert isinstance(event, LoadFailed)
        assert "SystemExit" in str(event.error)
    finally:
        consumer.close()


@pytest.mark.parametrize(
    "wrong",
    [lambda x: x.transpose(1, 2), lambda x: x[:, :, :-1], lambda x: x.float()],
    ids=["NHD", "short", "dtype"],
)
def test_a_gather_of_the_wrong_shape_fails_its_request(world: World, wrong: object) -> None:
    kv = dense()
    side = world.producers(kv)[0]
    side.session._encoding._gather = lambda tid, at: wrong(side.engine.gather(tid, at))
    send([side], 300, "raw")
    failed = wait_for(side.session.poll, Failed)
    assert "gather gave" in failed.reason


def test_closed_sessions_say_so(world: World) -> None:
    kv = dense()
    producer, consumer = world.producers(kv)[0].session, world.consumers(kv)[0].session
    loc = Locator("t", 10, (Endpoint("memory://nowhere", whole(kv)),), "raw")
    producer.close()
    consumer.close()
    with pytest.raises(TransportError, match="closed"):
        producer.open("t", 10, decision("raw"))
    with pytest.raises(TransferCancelled, match="closed"):
        consumer.fetch(loc, range(10), time.monotonic() + 1)


def test_no_thread_is_left_behind() -> None:
    before = set(threading.enumerate())
    world = World()
    kv = dense()
    load(world.consumers(kv), send(world.producers(kv), 300, "raw"))
    world.close()
    left = [t for t in threading.enumerate() if t not in before]
    assert not left


def test_values_that_a_stage_refuses_go_raw_alone_and_are_counted(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kv = dense()
    prefill, decode = world.producers(kv, names=("lossy",)), world.consumers(kv)
    from kvserve_core.errors import DriftError
    from kvserve_plugins.quantizers.uniform import Uniform

    encode = Uniform.encode

    def refuse_the_second_cell(self: Uniform, x: object, at: Region) -> object:
        if at.start == 256:
            raise DriftError("unlike what it was calibrated on")
        return encode(self, x, at)

    monkeypatch.setattr(Uniform, "encode", refuse_the_second_cell)
    (event,) = load(decode, send(prefill, 300, "lossy"))
    assert isinstance(event, Loaded)
    assert decode[0].engine.holds("t", range(256, 300), 300)
    source_segments = len(kv.groups[0].layers) * kv.groups[0].planes[0].num_heads * 2
    assert 0 < prefill[0].session.counters.snapshot()["fallback_raw"] <= source_segments
    assert "failed" not in caplog.text
