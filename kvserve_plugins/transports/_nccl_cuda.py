"""NCCL between two GPUs: what a pair's thread posts, on a stream of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvserve_core.bodies import Body
from kvserve_core.errors import FrameError, TransferTimeout
from kvserve_core.wire import Buffer
from kvserve_plugins.transports import _nccl_library as nccl
from kvserve_plugins.transports._nccl_channel import Check, Communicator, Connect, stalled

_POLL_S, _POLL_MOST_S, _POLL_PART = 5e-5, 1e-3, 0.05
"""Between two looks whether a batch is through: a part of the time so far, so that slow links cost few looks."""
_ASK_S = 0.02
"""Between two questions to NCCL whether it lost the peer."""
_DRAIN_S = 5.0
"""How long kernels of an aborted communicator may still be there."""


class Posted(NamedTuple):
    """A batch on the stream. since: ``time.monotonic()``. bodies: kept until it is through."""

    event: torch.cuda.Event
    since: float
    bodies: list[Tensor]


class NcclBackend:
    """Of the current GPU. ctas: multiprocessors that a communicator may use, None: as NCCL likes."""

    name = "nccl"
    on_device = True

    def __init__(self, timeout_s: float, ctas: int | None) -> None:
        nccl.library()
        self._timeout_s, self._ctas = timeout_s, ctas
        self._device = current()

    def device(self) -> str:
        """The GPU by its id, and by what NCCL tells hosts apart where that is set."""
        return f"{torch.cuda.get_device_properties(self._device).uuid} {os.environ.get('NCCL_HOSTID', '')}".strip()

    def host(self, bind: str) -> tuple[bytes, Connect]:
        """What to tell the other side, and how to meet it. NCCL itself picks the interface (``NCCL_SOCKET_IFNAME``)."""
        made = nccl.unique_id()
        return made, self._connect(made, 0)

    def guest(self, invite: bytes, host: str) -> Connect:
        """How to meet the side that made ``invite``."""
        if len(invite) != nccl.ID_BYTES:
            raise FrameError(f"an NCCL id of {len(invite)} bytes, expected {nccl.ID_BYTES}")
        return self._connect(invite, 1)

    def _connect(self, invite: bytes, rank: int) -> Connect:
        return lambda check: join(invite, rank, self._device, self._timeout_s, self._ctas, check)

    def taken(self, bodies: Sequence[Tensor]) -> list[tuple[Body, bytes | None]]:
        """What arrived, hashed where it lies, in one launch; for use on the current stream."""
        from kvserve_plugins.kernels.digest import piece_hashes

        for body in bodies[:1]:  # of one buffer
            body.record_stream(torch.cuda.current_stream(body.device))
        return list(zip(bodies, piece_hashes(bodies), strict=True))


def current() -> torch.device:
    """The GPU of this thread."""
    return torch.device("cuda", torch.cuda.current_device())


def join(
    invite: bytes, rank: int, device: torch.device, timeout_s: float, ctas: int | None, check: Check
) -> Communicator:
    """A communicator of two ranks, of which this is one; takes about a second.

    Raises:
        PeerLost: NCCL failed. TransferTimeout: the other rank did not come.
    """
    torch.cuda.set_device(device)
    handle, until = nccl.Handle(invite, rank, 2, ctas), time.monotonic() + timeout_s

    def looked() -> None:
        check()
        if time.monotonic() > until:
            raise TransferTimeout(
                f"the other side of the pair did not come within {timeout_s:.3g} s; check NCCL_SOCKET_IFNAME on both"
            )

    try:
        settle(handle, looked)
    except BaseException:
        handle.abort()
        raise
    return NcclPair(handle, rank, device)


def settle(handle: nccl.Handle, check: Callable[[], None]) -> None:
    """Wait until what was begun is set up."""
    while not handle.settled():
        check()
        nccl.pause()


class NcclPair:
    """See :class:`Communicator`."""

    def __init__(self, handle: nccl.Handle, rank: int, device: torch.device) -> None:
        self._handle, self._rank, self._device = handle, rank, device
        self._asked = 0.0
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch does not annotate it

    def post(self, bodies: Sequence[Body | int], check: Check) -> Posted:
        """One group of calls. The first batch connects the two, for which both must be there."""
        since = time.monotonic()
        with torch.cuda.stream(self._stream):
            largest = max((b for b in bodies if isinstance(b, int)), default=0)
            zeros = torch.zeros(largest, dtype=torch.uint8, device=self._device)
            tensors = [zeros[:b] if isinstance(b, int) else self._tensor(b) for b in bodies]
            tensors = [t for t in tensors if t.numel()]
            sends, receives = ([], tensors) if self._rank else (tensors, [])
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # as above
            if tensors:
                self._handle.move(sends, receives, 1 - self._rank, self._stream.cuda_stream)
                settle(self._handle, lambda: _look(check, since))
            event.record(self._stream)
        return Posted(event, since, tensors)

    def through(self, posted: Posted, check: Check) -> bool:
        """See :class:`Communicator`. Where NCCL goes through a network it sees for itself that the peer is gone."""
        if posted.event.query():  # type: ignore[no-untyped-call]  # torch does not annotate it
            return True
        _look(check, posted.since)
        if time.monotonic() - self._asked > _ASK_S:
            self._asked = time.monotonic()
            self._handle.settled()
        time.sleep(min(max(_POLL_S, _POLL_PART * (time.monotonic() - posted.since)), _POLL_MOST_S))
        return False

    def room(self, sizes: Sequence[int]) -> list[Tensor]:
        """See :class:`Communicator`. Memory of this pair's stream, so that nothing queued elsewhere holds it up."""
        with torch.cuda.stream(self._stream):
            whole = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        return list(whole.split_with_sizes(list(sizes)))

    def interrupt(self) -> None:
        """The thread that waits looks around by itself."""

    def abort(self) -> None:
        """See :class:`Communicator`. Its kernels see it and end; until then the memory they use is kept."""
        self._handle.abort()
        until = time.monotonic() + _DRAIN_S
        while not self._stream.query() and time.monotonic() < until:
            nccl.pause()

    def _tensor(self, body: Body) -> Tensor:
        if isinstance(body, Buffer):
            return torch.from_numpy(np.frombuffer(body, np.uint8).copy()).to(self._device)
        return body.to(self._device)


def _look(check: Check, since: float) -> None:
    check()
    if late := stalled(since):
        raise late
