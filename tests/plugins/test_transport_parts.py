"""Leases on an injected clock, pacing, faults, addresses, messages and the manifest."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve_core.errors import ConfigError, FrameError, LeaseLost, TransportError
from kvserve_core.policy import Outcome
from kvserve_core.registry import summary_of
from kvserve_plugins import transports
from kvserve_plugins.transports import _tcp_messages as msg
from kvserve_plugins.transports._leases import Leases
from kvserve_plugins.transports._pacing import Pacer
from kvserve_plugins.transports._tcp_address import Address, parse, published
from kvserve_plugins.transports._tcp_delivery import LinkClock
from kvserve_plugins.transports._tcp_faults import Faults, corrupted, parse_faults
from kvserve_plugins.transports.cuda_ipc import CudaIpc
from kvserve_plugins.transports.file import File
from kvserve_plugins.transports.memory import Memory
from kvserve_plugins.transports.nccl import Nccl
from kvserve_plugins.transports.tcp import Tcp
from plugins.transport_checks import PEER, Source


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_summaries_equal_docstrings_and_the_hook_imports_neither_zmq_nor_torch() -> None:
    found = {c.name: c.summary for c in transports.kvserve_transports()}
    classes = {"memory": Memory, "file": File, "tcp": Tcp, "cuda_ipc": CudaIpc, "nccl": Nccl}
    assert found == {name: summary_of(cls) for name, cls in classes.items()}
    code = (
        "import sys, kvserve_plugins.transports as t; list(t.kvserve_transports());"
        "sys.exit(bool({'zmq', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_lease_runs_out_on_its_clock_and_renewal_extends_it() -> None:
    clock = Clock()
    leases = Leases(clock)
    source = Source()
    leases.add("t", source, 10)
    clock.now += 9
    leases.renew("t", 10)
    leases.renew("t", 1)  # never sooner than it would have ended
    clock.now += 9
    assert leases.get("t").source is source
    assert leases.expire() == pytest.approx(119)
    clock.now += 1
    with pytest.raises(LeaseLost):
        leases.get("t")
    with pytest.raises(LeaseLost):
        leases.renew("t", 10)
    assert [(r.key, r.reason) for r in leases.poll()] == [("t", "its lease ran out")]
    assert leases.poll() == []
    assert source.closed == "its lease ran out"


@given(st.permutations([(i, 3) for i in range(3)] * 2))
def test_shares_in_any_order_and_repeated_free_exactly_once(order: list[tuple[int, int]]) -> None:
    leases = Leases()
    leases.add("t", Source(1, 8), 10)
    for n, share in enumerate(order):
        leases.release("t", share, Outcome("t", "raw", 1, 1))
        assert len(leases) == (len(set(order[: n + 1])) < 3)
    (released,) = leases.poll()
    assert len(released.reports) == 3


def test_a_lease_waits_for_its_source_and_starts_over_on_use() -> None:
    clock = Clock()
    leases = Leases(clock)
    source = Source(2, ready=False)
    leases.add("t", source, 10)
    clock.now += 100
    leases.expire()
    source.finish()
    clock.now += 9
    leases.get("t").used()
    clock.now += 9
    assert leases.get("t").expires == pytest.approx(219)
    clock.now += 1
    leases.expire()
    assert source.closed == "its lease ran out"


def test_the_first_share_says_how_many_there_are() -> None:
    leases = Leases()
    leases.add("t", Source(1, 8), 10)
    leases.release("t", (0, 2), Outcome("t", "raw", 1, 1))
    for i in range(1, 5):
        with pytest.raises(TransportError, match="shared by 2"):
            leases.release("t", (i, 4096), Outcome("t", "raw", 1, 1))
    assert len(leases.get("t").reports) == len(leases.get("t").shares) == 1
    leases.release("t", (1, 2), None)
    assert [len(r.reports) for r in leases.poll()] == [1]


@pytest.mark.parametrize(
    "change",
    [
        {"transfer_s": float("nan")},
        {"total_s": float("inf")},
        {"decode_s": -1.0},
        {"encode_s": 1e300},
        {"raw_bytes": -1},
        {"wire_bytes": 2**62 + 1},
        {"profile": "p" * 5000},
    ],
)
def test_an_absurd_report_is_dropped_and_the_share_counts(change: dict[str, object]) -> None:
    leases = Leases()
    leases.add("t", Source(1, 8), 10)
    leases.release("t", (0, 1), replace(Outcome("t", "raw", 1, 1), **change))
    (released,) = leases.poll()
    assert (released.reason, released.reports) == ("", ())


def test_a_long_reason_is_cut() -> None:
    leases = Leases()
    leases.add("t", Source(1, 8), 10)
    leases.release("t", (0, 1), Outcome("t", "raw", 1, 1, ok=False, reason="x" * 10_000))
    (released,) = leases.poll()
    assert released.reports[0].reason == "x" * 256


@settings(max_examples=10)
@given(st.lists(st.integers(1, 1000), min_size=8, max_size=8))
def test_a_pacer_shared_by_threads_books_every_byte_once(sizes: list[int]) -> None:
    class Slow(float):
        """A rate whose division lets other threads run."""

        def __rtruediv__(self, nbytes: float) -> float:
            time.sleep(1e-4)
            return nbytes / float(self)

    pacer = Pacer(Slow(1.0), lambda: 100.0)
    with ThreadPoolExecutor(4) as pool:
        due = list(pool.map(pacer.due, sizes))
    assert max(due) == pytest.approx(100.0 + sum(sizes))


@pytest.mark.parametrize("share", [(1, 1), (-1, 2), (0, 0), (0, 2**62), (0, 4097)])
def test_a_share_that_does_not_exist_is_refused(share: tuple[int, int]) -> None:
    with pytest.raises(TransportError, match="share"):
        Leases().release("t", share, None)


@given(st.lists(st.integers(1, 20_000), min_size=50, max_size=100), st.floats(0, 0.004))
def test_pacing_keeps_the_rate_whatever_the_lateness(sizes: list[int], late: float) -> None:
    clock = Clock()
    pacer = Pacer(2.5e6, clock)
    for size in sizes:
        clock.now = max(clock.now, pacer.due(size)) + late
    expected = sum(sizes) / 2.5e6
    spent = clock.now - 100.0
    assert expected <= spent + 1e-9
    assert spent <= expected + len(sizes) * late + 1e-9


def test_a_late_caller_still_gets_the_rate() -> None:
    clock = Clock()
    pacer = Pacer(2.5e6, clock)
    for _ in range(80):
        clock.now = max(clock.now, pacer.due(12_500)) + 0.001
    assert clock.now - 100.0 == pytest.approx(0.4, rel=0.01)


def test_an_idle_link_saves_nothing_up() -> None:
    clock = Clock()
    pacer = Pacer(1e6, clock)
    pacer.due(1000)
    clock.now += 0.005
    pacer.rest()
    assert pacer.due(10_000) == pytest.approx(clock.now + 0.01)
    assert Pacer(None, clock).due(10**9) == clock.now
    assert 4096 <= pacer.piece(2**20) <= 2**16


def test_link_time_leaves_out_a_busy_consumer() -> None:
    clock = LinkClock(0.0)
    clock.blocked(1.0, 1000)  # 1000 bytes in one second
    clock.away(11.0, 500, more=False)  # 500 more came some time in ten seconds
    assert clock.seconds == pytest.approx(1.5)
    clock.away(13.0, 10, more=True)  # the link was busy all along
    assert clock.seconds == pytest.approx(3.5)


def test_faults_are_parsed_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSERVE_FAULT_TCP", "drop:2")
    faults = Faults("")
    assert [faults.next(), getattr(faults.next(), "action", None), faults.next()] == [None, "drop", None]
    assert parse_faults("delay:3:0.5")[3].seconds == 0.5
    for bad in ("explode:1", "drop", "drop:x", "delay:1:2:3"):
        with pytest.raises(ConfigError, match=r"delay:3:0\.5"):
            parse_faults(bad)
    sealed = Source(1, 64).sealed[0]
    assert bytes(corrupted(sealed).body) != bytes(sealed.body)
    empty = replace(sealed, body=b"")
    assert corrupted(empty) == empty


def test_loopback_of_another_machine_says_what_to_set() -> None:
    here = published("127.0.0.1", 5)
    assert parse(str(here)) == here
    assert parse("tcp://10.0.0.5:7") == Address("10.0.0.5", 7)
    assert parse(str(Address("::1", 7))) == Address("::1", 7)
    with pytest.raises(TransportError, match=r"set transport\.tcp\.bind \(and transport\.tcp\.advertise"):
        parse("tcp://127.0.0.1:5?host=0123456789abcdef")


@given(st.binary(max_size=200))
def test_random_bytes_are_never_more_than_malformed(data: bytes) -> None:
    for decode in (msg.decode_request, msg.decode_reply):
        try:
            decode(data)
        except FrameError:
            continue


@pytest.mark.parametrize(
    "sent",
    [
        ["fetch", 0, "t", [[0]], {}, 1, 1.0],
        ["fetch", -1, "t", [], {}, 1, 1.0],
        ["credit", 0, 2**63],
        ["release", "t", [0, -1], None],
        ["release", "t" * 2000, [0, 1], None],
        ["unknown"],
        {"__reduce__": "x"},
    ],
)
def test_wrong_types_are_malformed(sent: object) -> None:
    with pytest.raises(FrameError, match="malformed"):
        msg.decode_request(msgspec.msgpack.encode(sent))


def test_a_request_survives_the_wire() -> None:
    fetch = msg.Fetch(1, "t", tuple(Source().plan), PEER, 5, 1.5)
    assert msg.decode_request(msg.encode(fetch)) == fetch


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bind": "10.0.0.5"}, "key_dir"),
        ({"bind": "0.0.0.0", "insecure": True}, "advertise"),
        ({"max_bandwidth": "fast"}, "25Gbps"),
        ({"window": 1}, "greater"),
    ],
)
def test_an_unsafe_or_wrong_configuration_is_refused(config: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tcp.Config(**config)
