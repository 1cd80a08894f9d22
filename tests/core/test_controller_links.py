"""What reports teach a controller of links: whose they are, and what failed fetches say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from controller_cases import GBPS, MIB, Clock, three
from kvserve_core.policy import Outcome, ServiceContext


def test_the_estimate_of_the_link_is_used_and_learned() -> None:
    control = three(prior_bandwidth=5000 * GBPS, clock=Clock())
    context = ServiceContext(nbytes=56 * MIB, link="west")
    first = control.choose(context)
    assert (first.profile, first.bandwidth) == ("raw", 5000 * GBPS)
    for _ in range(2):
        control.observe(first, Outcome("t", "raw", 56 * MIB, 56 * MIB, transfer_s=56 * MIB / (5 * GBPS), link="west"))
    second = control.choose(context)
    assert second.profile == "slow9"
    assert second.bandwidth == pytest.approx(5 * GBPS, rel=0.2)
    assert control.choose(replace(context, link="east")).bandwidth == 5000 * GBPS


def test_a_decision_for_an_unknown_peer_learns_from_the_link_that_was_used() -> None:
    control = three(clock=Clock())
    decision = control.choose(ServiceContext(nbytes=MIB))
    control.observe(decision, Outcome("t", "raw", 10**8, 10**8, transfer_s=10.0, link="west"))
    assert control.links.estimate("default") == control.links.estimate("west") < 2e7


def timed_out(transfer_s: float, wire_bytes: int = 0, reason: str = "TransferTimeout: it did not end") -> Outcome:
    return Outcome("t", "raw", 10**9, wire_bytes, transfer_s=transfer_s, ok=False, reason=reason, link="west")


def test_fetches_that_time_out_say_that_the_link_is_no_faster() -> None:
    """Nothing came in twice 30 s: the next request is compressed, and sent as before when the link is back."""
    control = three(prior_bandwidth=5000 * GBPS, clock=Clock())
    context = ServiceContext(nbytes=10**9, link="west")
    decision = control.choose(context)
    assert decision.profile == "raw"
    for _ in range(2):
        control.observe(decision, timed_out(30.0))
    assert control.links.estimate("west") < 1e4
    assert control.choose(context).profile == "slow9"
    for _ in range(2):
        control.observe(decision, Outcome("t", "raw", 10**9, 10**9, transfer_s=1.6e-3, link="west"))
    assert control.choose(context).profile == "raw"


@pytest.mark.parametrize(
    "report",
    [
        timed_out(1.0, 10**10),
        timed_out(0.0),
        timed_out(30.0, reason="PeerLost: it is gone"),
        timed_out(30.0, reason=None),  # type: ignore[arg-type]  # wrong on purpose
    ],
    ids=["came fast", "no time", "another reason", "no reason"],
)
def test_other_failures_say_nothing_of_the_link(report: Outcome) -> None:
    control = three(clock=Clock())
    control.observe(control.choose(ServiceContext(nbytes=10**9, link="west")), report)
    assert control.links.estimate("west") == control.links.prior


def test_writing_to_a_store_says_nothing_of_the_link_it_is_read_over() -> None:
    control = three(clock=Clock(), priors={"disk": 100 * GBPS})
    asked = ServiceContext(nbytes=10**8, link="disk", intent="store")
    decision = control.choose(asked)
    for _ in range(3):
        control.observe(decision, Outcome("t", decision.profile, 10**8, 2 * 10**7, transfer_s=2.0, link="uplink"))
    assert control.links.estimate("uplink") < 2e7
    assert control.choose(asked).bandwidth == 100 * GBPS


def test_figures_of_numpy_are_figures() -> None:
    control = three(clock=Clock())
    decision = control.choose(ServiceContext(nbytes=10**8))
    sizes = np.array([10**8, 10**8 // 4])
    control.observe(decision, Outcome("t", "raw", sizes[0], sizes[1], transfer_s=np.float64(1.0)))
    assert control.refused_outcomes == 0
    assert control.links.estimate() == pytest.approx(2.5e7, rel=0.1)
