"""The ``memory`` transport."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Sequence

from pydantic import Field

from kvserve_core.component import ComponentConfig
from kvserve_core.errors import KVServeError, PeerLost, TransferTimeout, TransportError
from kvserve_core.policy import Outcome
from kvserve_core.transport import Delivery, Released, SegmentSource, Selection
from kvserve_core.wire import Sealed
from kvserve_plugins.transports._hashing import HashesOnDevice
from kvserve_plugins.transports._leases import Leases, Offer
from kvserve_plugins.transports._serving import (
    LocalDelivery,
    checked_key,
    checked_segment,
    failed_source,
    select,
    timed_out,
)

SCHEME = "memory://"
_publishers: dict[str, Memory] = {}
_lock = threading.Lock()


class Memory(HashesOnDevice):
    """Inside one process: for tests and for engines that share it.

    Address: ``memory://<name>``. A publisher claims its name with the first publish and frees it with ``close``.
    Segments are handed over without a copy.
    """

    class Config(ComponentConfig):
        """``name``: of this publisher, unique in the process; drawn at random when empty."""

        name: str = Field("", max_length=200)

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._name = config.name or uuid.uuid4().hex
        self._leases = Leases()

    @property
    def address(self) -> str:
        """``memory://<name>``; claims the name.

        Raises:
            TransportError: another publisher of this process has it.
        """
        with _lock:
            if _publishers.setdefault(self._name, self) is not self:
                raise TransportError(f"another publisher of this process is named {self._name!r}; give each its own")
        return SCHEME + self._name

    def publish(self, key: str, source: SegmentSource, lease_s: float) -> str:
        """Offer ``source`` to this process."""
        address = self.address
        self._leases.add(checked_key(key), source, lease_s)
        return address

    def fetch(self, address: str, key: str, want: Selection, deadline: float) -> Delivery:
        """The segments, as the source has them."""
        offer = _publisher(address)._leases.get(checked_key(key))
        source, started = offer.source, time.monotonic()
        indices = select(source.header, source.plan, want)
        return LocalDelivery(source.header, indices, lambda i: _get(offer, i, deadline, address, started), waits=True)

    def renew(self, address: str, key: str, lease_s: float) -> None:
        """Extend the lease."""
        _publisher(address)._leases.renew(key, lease_s)

    def release(self, address: str, key: str, share: tuple[int, int], report: Outcome | None) -> None:
        """One share is done; ends the offer with the last."""
        publisher = _publishers.get(address.removeprefix(SCHEME))
        if publisher is not None:
            publisher._leases.release(key, share, report)

    def withdraw(self, key: str, reason: str) -> None:
        """Stop offering ``key``."""
        self._leases.withdraw(key, reason)

    def poll(self) -> Sequence[Released]:
        """What ended since the last call."""
        return self._leases.poll()

    def close(self) -> None:
        """Withdraw everything and free the name."""
        with _lock:
            if _publishers.get(self._name) is self:
                del _publishers[self._name]
        self._leases.withdraw_all("the transport was closed")


def _publisher(address: str) -> Memory:
    publisher = _publishers.get(address.removeprefix(SCHEME)) if address.startswith(SCHEME) else None
    if publisher is None:
        raise PeerLost(f"no publisher of this process answers at {address!r}; 'memory' does not leave the process")
    return publisher


def _get(offer: Offer, index: int, deadline: float, address: str, started: float) -> Sealed:
    if offer.ended:
        raise offer.failure()
    try:
        sealed = checked_segment(offer.source.get(index, deadline), index)
        offer.used()
        return sealed
    except TransferTimeout as error:
        raise timed_out(f"the producer at {address}", offer.key, time.monotonic() - started) from error
    except TransportError as error:
        raise (offer.failure() if offer.ended else error) from error
    except KVServeError:
        raise
    except Exception as error:
        raise failed_source(offer.key, error) from error
