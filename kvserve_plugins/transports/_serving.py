"""What every transport checks before it serves, and the delivery of transports that need no network."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvserve_core import wire
from kvserve_core.bodies import host_bytes
from kvserve_core.errors import PeerLost, TransferCancelled, TransferTimeout, TransportError, Unacceptable
from kvserve_core.peer import PeerInfo, Refusal, acceptable
from kvserve_core.spec import Region
from kvserve_core.transport import DeliveryStats, Selection
from kvserve_core.wire import FrameHeader, Sealed
from kvserve_plugins.transports._selection import check_size, covering

MAX_KEY = 1024


def refusal(header: FrameHeader, peer: PeerInfo) -> Refusal | None:
    """Why ``peer`` cannot use this frame at all, or None."""
    low, high = peer.wire
    if not low <= wire.VERSION[0] <= high:
        detail = f"the producer writes frame version {wire.VERSION[0]}, the consumer reads {low} to {high}"
        return Refusal((f"frame@{wire.VERSION[0]}",), detail)
    if peer.fingerprint != header.fingerprint:
        detail = f"the two sides serve different models (the consumer's is {peer.fingerprint[:16]!r})"
        return Refusal((f"model:{header.fingerprint[:16]}",), detail)
    return acceptable([chain.stages for chain in header.chains], header.artefacts, peer)


def select(header: FrameHeader, plan: Sequence[Region], want: Selection) -> list[int]:
    """Indices of the smallest set of whole segments that covers ``want``.

    Raises:
        Unacceptable: the peer cannot decode the frame. TransportError: more regions than are served at once.
    """
    check_size(want.regions)
    if no := refusal(header, want.peer):
        raise Unacceptable(no.stages, no.detail)
    return covering(plan, want.regions)


def checked_key(key: str) -> str:
    """``key``, where it can name a transfer on every transport.

    Raises:
        TransportError: it is not Unicode text (lone surrogates), or too long.
    """
    try:
        key.encode()
    except UnicodeEncodeError:
        raise TransportError(f"the key {key!r} is not valid Unicode text; use another transfer id") from None
    if len(key) > MAX_KEY:
        raise TransportError(f"a key of {len(key)} characters ({key[:40]!r}...); at most {MAX_KEY} are allowed")
    return key


def timed_out(what: str, key: str, seconds: float) -> TransferTimeout:
    """The one wording of a passed deadline."""
    return TransferTimeout(f"no answer from {what} for {key!r} after {seconds:.3g} s; recompute, or allow more time")


def checked_segment(got: object, index: int, on_device: bool = False) -> Sealed:
    """What a source gave for segment ``index``, where it is that. on_device: leave a body on a device there.

    Raises:
        TransportError: it is something else.
    """
    if not isinstance(got, Sealed) or got.index != index:
        raise TransportError(f"the source gave {type(got).__name__} for segment {index}, expected that segment sealed")
    tensor = _is_bytes(got.body)
    for part in (got.head,) if tensor else (got.head, got.body):
        if not isinstance(part, bytes | bytearray) and not (isinstance(part, memoryview) and _is_plain(part)):
            raise TransportError(f"head or body of segment {index} is {type(part).__name__}, expected contiguous bytes")
    return replace(got, body=host_bytes(got.body)) if tensor and not on_device else got


def _is_bytes(body: object) -> bool:
    return isinstance(body, Tensor) and body.dtype is torch.uint8 and body.ndim == 1 and body.is_contiguous()


def _is_plain(view: memoryview) -> bool:
    return view.contiguous and view.ndim == 1 and view.itemsize == 1


def failed_source(key: str, error: BaseException) -> PeerLost:
    """What the consumer is told of a source that raised something of its own."""
    return PeerLost(f"the source of {key!r} failed: {type(error).__name__}: {error}")


def cancelled(key: str) -> TransferCancelled:
    """What iterating a delivery that was closed early raises."""
    return TransferCancelled(f"the delivery of {key!r} was closed here before its last segment")


class LocalDelivery:
    """Segments by index from a function of this process. ``stats`` counts what was taken so far."""

    def __init__(
        self,
        header: FrameHeader,
        indices: Sequence[int],
        get: Callable[[int], Sealed],
        waits: bool,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.header = header
        self.stats = DeliveryStats(len(wire.pack_header(header)))
        self._indices, self._get, self._waits, self._on_close = indices, get, waits, on_close
        self._closed = False

    def __iter__(self) -> Iterator[Sealed]:
        try:
            for index in self._indices:
                yield self._take(index)
        finally:
            self.close()

    def _take(self, index: int) -> Sealed:
        if self._closed:
            raise cancelled(self.header.transfer_id)
        start = time.perf_counter()
        sealed = self._get(index)
        spent = time.perf_counter() - start
        old, waited = self.stats, spent if self._waits else 0.0
        self.stats = DeliveryStats(old.nbytes + sealed.nbytes, old.seconds + spent, old.waited_s + waited)
        return sealed

    def close(self) -> None:
        """Stop early, and free what the delivery holds."""
        if not self._closed:
            self._closed = True
            self._on_close()
