"""The ``nccl`` transport."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from kvserve_core.transport import Delivery, Selection
from kvserve_core.units import Duration, Size
from kvserve_plugins.transports import _tcp_messages as msg
from kvserve_plugins.transports._carrier import Carrier
from kvserve_plugins.transports._nccl_carrier import PairCarrier
from kvserve_plugins.transports._nccl_channel import Backend
from kvserve_plugins.transports._nccl_delivery import PairDelivery
from kvserve_plugins.transports._nccl_pairs import PairPool
from kvserve_plugins.transports._pacing import Pacer
from kvserve_plugins.transports._tcp_address import is_loopback, parse
from kvserve_plugins.transports.tcp import Tcp


class Nccl(Tcp):
    """Between two GPUs, of one host or two: requests over ZeroMQ, bodies over NCCL.

    Address: ``nccl://host:port``. Requests, leases and limits are those of ``tcp``; in place of bodies go tickets. A
    consumer asks for the next bodies when it has room for them, both sides post them in that order, and digests are
    checked where they arrive. Two processes share one communicator, made with their first fetch (about a second) and
    kept; one that fails, or whose peer is lost, costs the fetches under way and is made anew.

    NCCL neither encrypts nor authenticates: ``key_dir`` protects requests only, so use a network that you trust.
    """

    staging: ClassVar[Literal["host", "device"]] = "device"
    scheme: ClassVar[str] = "nccl"

    class Config(Tcp.Config):
        """As ``tcp``'s.

        backend: ``gloo`` goes between the memory of hosts, to try it without GPUs; alike on both sides. ctas: most
        multiprocessors a communicator uses, NCCL's own choice by default. max_pairs: communicators of a producer, and
        of a consumer. join_timeout: for making one. window: bytes under way per fetch. heartbeat: an unanswering peer
        is lost after three.
        """

        backend: Literal["nccl", "gloo"] = "nccl"
        ctas: int | None = Field(None, ge=1, le=64)
        max_pairs: int = Field(16, ge=1, le=1024)
        join_timeout: Duration = Field(30.0, gt=0, le=600)
        window: Size = Field(256 * 2**20, ge=4 * msg.PIECE_BYTES, le=4 * 2**30)

        @model_validator(mode="after")
        def _open(self) -> Self:
            if self.backend == "gloo" and not is_loopback(self.bind) and not self.insecure:
                raise ValueError(
                    f"backend = 'gloo' on bind = {self.bind!r} opens ports that no key protects; set insecure = true on"
                    " a network where everyone may read and fetch KV caches, or use 'tcp'"
                )
            return self

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._pool = PairPool(self._links, self._backend, config.max_pairs)

    def _backend(self) -> Backend:
        """Of the current GPU."""
        if self.config.backend == "gloo":
            from kvserve_plugins.transports._nccl_gloo import GlooBackend

            return GlooBackend(self.config.join_timeout)
        from kvserve_plugins.transports._nccl_cuda import NcclBackend

        return NcclBackend(self.config.join_timeout, self.config.ctas)

    def _carrier(self, pacer: Pacer) -> Carrier:
        c = self.config
        return PairCarrier(self._backend(), c.advertise or c.bind, c.max_pairs, c.heartbeat)

    def fetch(self, address: str, key: str, want: Selection, deadline: float) -> Delivery:
        """As :meth:`Tcp.fetch`; bodies lie on the current GPU, or with ``gloo`` on the host.

        Raises:
            UnavailableComponentError: there is no GPU, or no NCCL. TransportError: both sides use one GPU.
        """
        at = parse(address, self.scheme)
        link = self._links.take(at)
        return PairDelivery(
            link,
            key,
            want,
            deadline,
            self.config.window,
            lambda got: self._links.give(at, got),
            lambda: self._pool.take(at, key, deadline),
            self._pool.give,
        )

    def close(self) -> None:
        """As :meth:`Tcp.close`; ends all pairs."""
        super().close()
        self._pool.close()
