"""Probing a link that nobody uses: when, by whom, and what is learned."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from controller_cases import Clock
from kvserve_core.bandwidth import STALE_S, BandwidthEstimator
from kvserve_core.controller import Controller
from kvserve_core.errors import ConfigError
from kvserve_core.policy import ServiceContext
from kvserve_plugins.policies.analytic import Analytic


def test_a_probe_is_sent_only_over_a_link_that_nobody_uses() -> None:
    clock = Clock()
    links = BandwidthEstimator(1e9, clock=clock)
    sent: list[str] = []

    def send(link: str) -> tuple[int, float]:
        sent.append(link)
        return 10**7, 0.1

    assert links.probe("a", send) == pytest.approx(1e8, rel=0.2)
    links.probe("a", send)
    clock.now += 61.0
    links.probe("a", send)
    assert sent == ["a", "a"]


def over_a_socket(_: str, nbytes: int = 2**20) -> tuple[int, float]:
    """Real bytes from one thread to another, timed where they arrive."""
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        began = time.perf_counter()
        sent = pool.submit(theirs.sendall, bytes(nbytes))
        came = 0
        while came < nbytes:
            came += len(ours.recv(nbytes))
        sent.result()
        return came, time.perf_counter() - began


def test_an_adapter_probes_what_is_stale_in_idle_moments() -> None:
    clock = Clock()
    control = Controller(None, Analytic(Analytic.Config()), priors={"west": 1e6, "east": 2e6}, clock=clock)
    links = control.links
    links.observe("east", 10**7, 1.0)
    assert links.stale() == ["west"]
    measured: list[float] = []

    def send(link: str) -> tuple[int, float]:
        nbytes, seconds = over_a_socket(link)
        measured.append(nbytes / seconds)
        return nbytes, seconds

    for link in links.stale():
        links.probe(link, send)
    assert links.stale() == []
    assert sorted([1e6, links.estimate("west"), *measured])[1] == links.estimate("west") != 1e6
    assert control.choose(ServiceContext(nbytes=10**8, link="west")).bandwidth == links.estimate("west")
    clock.now += STALE_S + 1.0
    assert set(links.stale()) == {"west", "east"}


def test_a_probe_that_fails_teaches_nothing_and_can_be_tried_again() -> None:
    def fail(link: str) -> tuple[int, float]:
        raise ConnectionError(link)

    links = BandwidthEstimator(1e9, priors={"west": 5e8}, clock=Clock())
    with pytest.raises(ConnectionError, match="west"):
        links.probe("west", fail)
    with pytest.raises(ConfigError, match=r"west: a probe of 100 bytes says nothing; send 65536 or more"):
        links.probe("west", lambda _: (100, 0.1))
    for seconds in (0.0, -1.0, float("nan"), float("inf"), 1e9):
        with pytest.raises(ConfigError, match=rf"west: a probe of 100000000 bytes in {seconds} s cannot be"):
            links.probe("west", lambda _, seconds=seconds: (10**8, seconds))  # type: ignore[misc]  # bound now
    with pytest.raises(ConfigError, match="cannot be; expected at most"):
        links.probe("west", lambda _: (2**60, 1.0))
    assert links.estimate("west") == 5e8
    assert links.probe("west", lambda _: (10**8, 1.0)) == pytest.approx(1e8, rel=0.1)


def test_only_one_thread_probes_a_link() -> None:
    links, inside, calls = BandwidthEstimator(1e9, clock=Clock()), threading.Event(), []

    def send(link: str) -> tuple[int, float]:
        calls.append(link)
        inside.wait(10.0)
        return 10**8, 1.0

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(links.probe, "a", send)
        while not calls:
            time.sleep(0.001)
        assert links.probe("a", send) == 1e9, "it goes on with what is known"
        inside.set()
        assert first.result() == pytest.approx(1e8, rel=0.1)
    assert calls == ["a"]
