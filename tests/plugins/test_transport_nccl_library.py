"""The backend ``nccl`` over a stand-in for NCCL: what is called and when, what fails, and whole fetches."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvserve_core.errors import (
    FrameError,
    PeerLost,
    TransferCancelled,
    TransferTimeout,
    TransportError,
    UnavailableComponentError,
)
from kvserve_plugins.transports import _nccl_channel, _nccl_cuda
from kvserve_plugins.transports import _nccl_library as nccl
from kvserve_plugins.transports.nccl import Nccl
from plugins.nccl_peers import pairs
from plugins.nccl_stand_in import StandIn, installed
from plugins.transport_checks import Source, check, fetch_all, settle, threads

CPU = torch.device("cpu")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    yield installed(monkeypatch)
    settle(lambda: not threads())


def never() -> None:
    """What a check of something that goes well does."""


def test_structures_are_laid_out_as_in_nccl_h() -> None:
    assert (ctypes.sizeof(nccl.Config), ctypes.sizeof(nccl.UniqueId)) == (48, 128)
    at = {name: getattr(nccl.Config, name).offset for name, _ in nccl.Config._fields_}
    assert (at["magic"], at["version"], at["blocking"], at["max_ctas"], at["net_name"]) == (8, 12, 16, 28, 32)
    given = nccl.config(None)
    assert (given.size, given.magic, given.blocking, given.max_ctas) == (48, 0xCAFEBEEF, 0, -(2**31))
    assert nccl.config(4).max_ctas == 4


def test_whole_fetches(library: StandIn) -> None:
    producer, consumer, source = Nccl(Nccl.Config(ctas=2)), Nccl(Nccl.Config()), Source(40, 100_000)
    address = producer.publish("t", source, 60)
    for indices in ((), (3, 7), ()):
        check(fetch_all(consumer, address, source, *indices), source, *indices)
    assert sorted(config.max_ctas for config in library.configs) == [-(2**31), 2]
    assert library.calls.count("init") == 2
    assert len(pairs(producer)) == 1
    consumer.close()
    settle(lambda: not pairs(producer))
    producer.close()
    assert library.calls.count("abort") == 2


def test_a_communicator_that_fails_costs_the_fetch_and_is_made_anew(library: StandIn) -> None:
    producer, consumer, source = Nccl(Nccl.Config()), Nccl(Nccl.Config()), Source(4, 64_000)
    address = producer.publish("t", source, 60)
    library.fail = 6
    with pytest.raises(PeerLost, match="error 6; last line"):
        fetch_all(consumer, address, source)
    library.fail = 0
    check(fetch_all(consumer, address, source), source)
    consumer.close()
    producer.close()


def test_a_rank_that_is_alone_gives_up_and_frees_what_it_has(library: StandIn) -> None:
    with pytest.raises(TransferTimeout, match="NCCL_SOCKET_IFNAME"):
        _nccl_cuda.join(nccl.unique_id(), 0, CPU, 0.05, None, never)

    def closed() -> None:
        raise TransferCancelled("closed")

    with pytest.raises(TransferCancelled):
        _nccl_cuda.join(nccl.unique_id(), 1, CPU, 60, None, closed)
    assert library.calls.count("abort") == 2


def test_what_fails_at_once_says_what_and_leaves_nothing(library: StandIn) -> None:
    library.answers = {"init": 5}
    with pytest.raises(TransportError, match="opening a communicator failed in NCCL: error 5"):
        nccl.Handle(nccl.unique_id(), 0, 2, None)
    library.answers = {"id": 2}
    with pytest.raises(TransportError, match="meeting point"):
        nccl.unique_id()


def test_a_group_is_ended_also_when_a_call_in_it_fails(library: StandIn) -> None:
    handle = nccl.Handle(nccl.unique_id(), 0, 1, None)
    body = torch.zeros(64, dtype=torch.uint8)
    library.answers = {"recv": 4}
    with pytest.raises(TransportError, match="posting a batch failed in NCCL: error 4"):
        handle.move([body], [body.clone()], 0, 1)
    assert library.calls[-4:] == ["start", "send", "recv", "end"]
    handle.abort()
    handle.abort()
    assert library.calls.count("abort") == 1


def test_a_batch_that_stalls_and_one_whose_peer_is_lost(library: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    made = nccl.unique_id()
    nccl.Handle(made, 0, 2, None)
    pair = _nccl_cuda.join(made, 1, CPU, 5, None, never)
    bodies = pair.room([64, 0, 128])
    assert [b.numel() for b in bodies] == [64, 0, 128]
    posted = pair.post(bodies, never)
    assert library.calls.count("recv") == 2
    assert not pair.through(posted, never)
    pair.interrupt()
    library.fail = 6
    monkeypatch.setattr(_nccl_cuda, "_ASK_S", 0.0)
    with pytest.raises(PeerLost, match="'cuda_ipc'"):
        pair.through(posted, never)
    library.fail = 0
    monkeypatch.setattr(_nccl_channel, "STALL_S", 0.0)
    time.sleep(0.001)
    with pytest.raises(TransferTimeout, match="not through"):
        pair.through(posted, never)
    pair.abort()


def test_an_invitation_that_is_none_is_refused(library: StandIn) -> None:
    with pytest.raises(FrameError, match="128"):
        _nccl_cuda.NcclBackend(5.0, None).guest(b"short", "127.0.0.1")


def test_an_old_nccl_is_refused(library: Any) -> None:
    assert nccl.checked(library) is library
    library.version = 21700
    with pytest.raises(UnavailableComponentError, match="too old"):
        nccl.checked(library)
