"""Waiting for loads: whatever goes wrong meanwhile, each of them ends, and as failed unless all of it came."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from math import inf
from typing import Protocol, TypeVar

from kvserve_vllm.metadata import WorkerReport

log = logging.getLogger(__name__)
T = TypeVar("T", covariant=True)
WAIT_S = 0.0005
"""How often a load that the forward pass waits for is looked at."""
LET_GO_S = 1.0
"""How long loads may take, after their deadline or an error, to end by themselves."""
SILENT = "TransferTimeout: its deadline passed and nothing was heard of it, as of a store that hangs"


class Waited(Protocol[T]):
    """Loads by request."""

    def running(self, req_ids: Set[str]) -> set[str]:
        """Those of these that have not ended."""

    def poll(self, report: WorkerReport) -> list[T]:
        """Those that ended since the last call."""

    def cancel(self, req_ids: Set[str]) -> None:
        """Give these up."""

    def fail(self, req_id: str, reason: str, report: WorkerReport) -> None:
        """End one that was given up and says nothing."""


def wait_out(loads: Waited[T], req_ids: Set[str], report: WorkerReport, until_s: float = inf) -> list[T]:
    """Poll until these have ended, or until then by the monotonic clock; what ended."""
    ended: list[T] = []
    while loads.running(req_ids) and time.monotonic() < until_s:
        ended += loads.poll(report)
        time.sleep(WAIT_S)
    return ended


@contextmanager
def ending(loads: Waited[object], req_ids: Set[str], report: WorkerReport) -> Iterator[None]:
    """An error in here ends these loads before it goes on: the engine would wait for them, or compute on garbage."""
    try:
        yield
    except Exception as error:
        _let_go(loads, req_ids, report)
        give_up(loads, loads.running(req_ids), f"{type(error).__name__}: {error}", report)
        raise


def _let_go(loads: Waited[object], req_ids: Set[str], report: WorkerReport) -> None:
    """Loads that can still be heard of end by themselves: after that no thread writes into their blocks."""
    until_s = time.monotonic() + LET_GO_S
    try:
        loads.cancel(loads.running(req_ids))
        wait_out(loads, req_ids, report, until_s)
    except Exception:
        log.exception("loads that were cancelled are not heard of")


def give_up(loads: Waited[object], req_ids: Iterable[str], reason: str, report: WorkerReport) -> None:
    """End loads that do not end by themselves; their threads find that out before they write the next region."""
    for req_id in req_ids:
        log.warning("the load of request %r is given up: %s", req_id, reason)
        loads.fail(req_id, reason, report)
