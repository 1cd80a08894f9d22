"""The ``cuda_ipc`` transport."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator

from kvserve_core.errors import TransportError
from kvserve_core.transport import Delivery, Selection
from kvserve_core.units import Size
from kvserve_plugins.transports import _tcp_messages as msg
from kvserve_plugins.transports._carrier import Carrier
from kvserve_plugins.transports._cuda_memory import CudaMemory
from kvserve_plugins.transports._lending import Lender, Memory
from kvserve_plugins.transports._lent_delivery import LentDelivery
from kvserve_plugins.transports._pacing import Pacer
from kvserve_plugins.transports._tcp_address import is_loopback, parse
from kvserve_plugins.transports.tcp import Tcp


class CudaIpc(Tcp):
    """Between processes of one host through GPU memory, over a link of any bandwidth.

    Address: ``cuda_ipc://127.0.0.1:port?host=<id of the machine>``. Requests, leases and limits are those of ``tcp`` on
    loopback; in place of bodies go tickets for ``staging``, memory of the producer that consumers open and copy from.
    A place is free again when its consumer has copied it, was lost, or its fetch ended.
    """

    staging: ClassVar[Literal["host", "device"]] = "device"
    scheme: ClassVar[str] = "cuda_ipc"

    class Config(Tcp.Config):
        """As ``tcp``'s, on loopback only.

        staging: GPU memory of a producer for all fetches; the largest segment must fit. max_bandwidth: of everything
        this producer sends. key_dir: CURVE keys, where others share the host. window: bytes under way per fetch.
        timeout: for renewals. heartbeat: an unanswering peer is lost after three. faults: for tests only.
        """

        staging: Size = Field(256 * 2**20, ge=2**20)
        window: Size = Field(msg.MAX_WINDOW, ge=4 * msg.PIECE_BYTES, le=msg.MAX_WINDOW)

        @field_validator("bind")
        @classmethod
        def _here(cls, bind: str) -> str:
            if not is_loopback(bind):
                raise ValueError(f"bind = {bind!r}: GPU memory is shared within one host, so leave it at '127.0.0.1'")
            return bind

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.memory: Memory = self._memory()

    def _memory(self) -> Memory:
        return CudaMemory()

    def _carrier(self, pacer: Pacer) -> Carrier:
        return Lender(self.memory, self.config.staging)

    def fetch(self, address: str, key: str, want: Selection, deadline: float) -> Delivery:
        """As :meth:`Tcp.fetch`; bodies lie on the current GPU."""
        at = parse(address, self.scheme)
        if not at.host_id or not is_loopback(at.host):
            raise TransportError(f"{address!r} is not of this host; 'cuda_ipc' works within one, use 'tcp' or 'nccl'")
        link, window = self._links.take(at), self.config.window
        return LentDelivery(link, key, want, deadline, window, lambda got: self._links.give(at, got), self.memory)

    def close(self) -> None:
        """As :meth:`Tcp.close`; closes other producers' memory too."""
        super().close()
        self.memory.close()
