"""Gloo in NCCL's place: bodies between two processes' host memory, so that pairs can be tried without GPUs.

The ends find each other through a store of torch's that the sending side listens with; a secret that only the control
connection carries is part of every name in it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from kvserve_core.bodies import Body
from kvserve_core.errors import (
    FrameError,
    KVServeError,
    PeerLost,
    TransferTimeout,
    TransportError,
    UnavailableComponentError,
)
from kvserve_core.payload import as_bytes
from kvserve_core.wire import Buffer
from kvserve_plugins.transports import _nccl_channel
from kvserve_plugins.transports._nccl_channel import Check, Communicator, Connect

_store: Any = dist.TCPStore  # type: ignore[attr-defined]  # torch exports it at run time only
_options: Any = ProcessGroupGloo._Options  # type: ignore[attr-defined]  # as above
_NEVER = 2**31 - 1
"""A tag that no body has."""


class Invite(msgspec.Struct, frozen=True, array_like=True):
    """Where the store listens, and what its names begin with."""

    port: int
    secret: str


class GlooBackend:
    """``host``: the address of this machine at which a consumer reaches it."""

    name = "gloo"
    on_device = False

    def __init__(self, timeout_s: float) -> None:
        if not (dist.is_available() and dist.is_gloo_available()):
            raise UnavailableComponentError("this torch has no Gloo; use transport 'tcp'")
        self._timeout = timedelta(seconds=timeout_s)

    def device(self) -> str:
        """The host; two processes may share it."""
        return ""

    def host(self, bind: str) -> tuple[bytes, Connect]:
        """Listen at ``bind``: what to tell the other side, and how to meet it."""
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        with socket.socket(family) as listener:
            listener.bind((bind, 0))
            listener.listen()
            port, secret = listener.getsockname()[1], os.urandom(16).hex()
            fd = listener.detach()
        store = _store(bind, port, None, True, self._timeout, wait_for_workers=False, master_listen_fd=fd)
        return msgspec.msgpack.encode(Invite(port, secret)), lambda check: self._meet(store, secret, 0, bind)

    def guest(self, invite: bytes, host: str) -> Connect:
        """How to meet the side that listens at ``host``."""
        try:
            at = msgspec.msgpack.decode(invite, type=Invite)
        except (msgspec.MsgspecError, ValueError) as error:
            raise FrameError(f"a malformed invitation: {error}") from None
        if not 0 < at.port < 2**16:
            raise FrameError(f"an invitation to port {at.port}")

        def connect(check: Check) -> Communicator:
            store = _store(host, at.port, None, False, self._timeout)
            return self._meet(store, at.secret, 1, local_address(host, at.port))

        return connect

    def _meet(self, store: Store, secret: str, rank: int, here: str) -> Communicator:
        options = _options()
        options._devices = [ProcessGroupGloo.create_device(hostname=here)]
        options._timeout, options._threads = self._timeout, 1
        return GlooPair(ProcessGroupGloo(PrefixStore(secret, store), rank, 2, options), rank)

    def taken(self, bodies: Sequence[Tensor]) -> list[tuple[Body, bytes | None]]:
        """What arrived, as host bytes; whoever opens them hashes them."""
        return [(as_bytes(body), None) for body in bodies]


class GlooPair:
    """Gloo cannot be asked whether something is through, only waited for; what times out closes the connection."""

    def __init__(self, group: Any, rank: int) -> None:
        self._group, self._rank = group, rank
        self._count = 0

    def post(self, bodies: Sequence[Body | int], check: Check) -> list[tuple[Any, Tensor]]:
        """See :class:`Communicator`; tags are numbers that both sides count alike."""
        posted = []
        zeros = torch.zeros(max((b for b in bodies if isinstance(b, int)), default=0), dtype=torch.uint8)
        for tensor in filter(Tensor.numel, (zeros[:b] if isinstance(b, int) else _tensor(b) for b in bodies)):
            begin = self._group.recv if self._rank else self._group.send
            posted.append((begin([tensor], 1 - self._rank, self._count % _NEVER), tensor))
            self._count += 1
        return posted

    def through(self, posted: list[tuple[Any, Tensor]], check: Check) -> bool:
        """See :class:`Communicator`."""
        for work, _ in posted:
            check()
            try:
                work.wait(timedelta(seconds=_nccl_channel.STALL_S))
            except RuntimeError as error:
                check()  # a failure of the channel interrupts, and is the better reason
                raise _lost(error) from None
        return True

    def room(self, sizes: Sequence[int]) -> list[Tensor]:
        """See :class:`Communicator`."""
        return list(torch.empty(sum(sizes), dtype=torch.uint8).split_with_sizes(list(sizes)))

    def interrupt(self) -> None:
        """Let something time out: that closes the connection for all who wait."""
        with suppress(RuntimeError):
            never = self._group.recv([torch.empty(1, dtype=torch.uint8)], 1 - self._rank, _NEVER)
            never.wait(timedelta(milliseconds=1))

    def abort(self) -> None:
        """See :class:`Communicator`."""
        self.interrupt()


def _tensor(body: Body) -> Tensor:
    if isinstance(body, Buffer):
        return (
            torch.from_numpy(np.frombuffer(body, np.uint8).copy()) if len(body) else torch.empty(0, dtype=torch.uint8)
        )
    return body.cpu()


def _lost(error: RuntimeError) -> KVServeError:
    first = str(error).partition(". This is typically")[0][:300]
    return TransferTimeout(first) if "imed out" in first else PeerLost(f"the other side of the pair is gone: {first}")


def local_address(host: str, port: int) -> str:
    """The address of this machine that leads to ``host``.

    Raises:
        TransportError: none does.
    """
    try:
        family, kind, *_, at = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(at)  # of datagrams: sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise TransportError(f"no way from here to {host!r}: {error}") from None
