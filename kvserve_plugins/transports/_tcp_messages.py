"""What the two sides of ``tcp`` say to each other: tagged msgpack structs, typed and bounded when decoded.

Requests are one part. Replies are the struct, followed by the packed frame header (Opened) or by a piece of a segment's
body (Piece). Only durations cross machines. Join, Take and Leave are of transports whose bodies go beside (``nccl``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec

from kvserve_core.errors import (
    FrameError,
    KVServeError,
    LeaseLost,
    PeerLost,
    TransferTimeout,
    TransportError,
    Unacceptable,
)
from kvserve_core.peer import PeerInfo
from kvserve_core.policy import Outcome
from kvserve_core.spec import Region
from kvserve_core.wire import Buffer
from kvserve_plugins.transports._selection import MAX_REGIONS
from kvserve_plugins.transports._serving import MAX_KEY

PIECE_BYTES = 2**20
"""Longest piece of a body in one message."""
MAX_REQUEST = 2**20
MAX_REPLY = 2 * PIECE_BYTES
OVERHEAD = 4096
"""What one message costs in credit beside its bytes, so that tiny segments are bounded too."""
MAX_WINDOW = 64 * 2**20
MAX_TAKE = 256
"""Bodies that one Take asks for."""
MAX_QUEUED = 2 * MAX_WINDOW // OVERHEAD + 1024
"""Messages that may wait for one consumer: what its credit allows, twice since ZeroMQ counts with half a queue's
delay. Only one that does not read its answers comes to that."""
Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Key = Annotated[str, msgspec.Meta(max_length=MAX_KEY)]
MessageT = TypeVar("MessageT")
Text = Annotated[str, msgspec.Meta(max_length=256)]
Token = Annotated[bytes, msgspec.Meta(max_length=64)]
Code = Literal["lease", "aborted", "timeout", "unacceptable", "refused"]


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag="fetch"):
    """Send the segments that cover ``regions``; ``credit`` bytes may be under way before the next Credit."""

    stream: Natural
    key: Key
    regions: Annotated[tuple[Region, ...], msgspec.Meta(max_length=MAX_REGIONS)]
    peer: PeerInfo
    credit: Natural
    timeout_s: float


class Credit(msgspec.Struct, frozen=True, array_like=True, tag="credit"):
    """``nbytes`` more may be under way."""

    stream: Natural
    nbytes: Natural


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Forget the stream."""

    stream: Natural


class Renew(msgspec.Struct, frozen=True, array_like=True, tag="renew"):
    """Extend a lease; answered with Done or Failed."""

    stream: Natural
    key: Key
    lease_s: float


class Release(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    """A share is done with a key. Not answered."""

    key: Key
    share: tuple[Natural, Natural]
    report: Outcome | None


class Join(msgspec.Struct, frozen=True, array_like=True, tag="join"):
    """Open a way for bodies beside this connection, of a kind and from a device; answered with Joined or Failed."""

    stream: Natural
    backend: Text
    device: Text


class Take(msgspec.Struct, frozen=True, array_like=True, tag="take"):
    """Send the next bodies of a fetch, of these sizes, that way now: they are being received. Its order binds."""

    token: Token
    sizes: Annotated[tuple[Natural, ...], msgspec.Meta(max_length=MAX_TAKE)]


class Leave(msgspec.Struct, frozen=True, array_like=True, tag="leave"):
    """The way for bodies is no longer used."""


class Opened(msgspec.Struct, frozen=True, array_like=True, tag="opened"):
    """A fetch is accepted; ``count`` segments follow, in pieces."""

    stream: Natural
    count: Natural


class Piece(msgspec.Struct, frozen=True, array_like=True, tag="piece"):
    """Bytes from ``offset`` of the body of segment ``index``, ``size`` bytes long; the first brings the ``head``."""

    stream: Natural
    index: Natural
    offset: Natural
    size: Natural
    head: bytes


class End(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """The fetch is complete. ``waited_s``: how long the link had nothing, as this host had nothing for it."""

    stream: Natural
    waited_s: float


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """Nothing to say. Sent on a fetch that waits, since only sending shows that a consumer is gone."""

    stream: Natural


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """A request without other result has worked."""

    stream: Natural


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """A request or a fetch under way has failed."""

    stream: Natural
    code: Code
    detail: str
    stages: tuple[str, ...] = ()


class Joined(msgspec.Struct, frozen=True, array_like=True, tag="joined"):
    """How to open the other end."""

    stream: Natural
    invite: Annotated[bytes, msgspec.Meta(max_length=4096)]


class Going(msgspec.Struct, frozen=True, array_like=True, tag="going"):
    """The bodies of a Take are those of the fetch; where this does not come, the fetch had ended."""

    stream: Natural


Request: TypeAlias = Fetch | Credit | Cancel | Renew | Release | Join | Take | Leave
Reply: TypeAlias = Opened | Piece | End | Beat | Done | Failed | Joined | Going
encode = msgspec.msgpack.Encoder().encode
BEAT = encode(Beat(0))
_request = msgspec.msgpack.Decoder(Request)
_reply = msgspec.msgpack.Decoder(Reply)


def decode_request(data: Buffer) -> Request:
    """A consumer's message; raises FrameError when it is malformed."""
    return _decode(_request.decode, data)


def decode_reply(data: Buffer) -> Reply:
    """A producer's message; raises FrameError when it is malformed."""
    return _decode(_reply.decode, data)


def _decode(decoder: Callable[[Buffer], MessageT], data: Buffer) -> MessageT:
    try:
        return decoder(data)
    except (msgspec.MsgspecError, KVServeError, RecursionError, ValueError) as error:
        raise FrameError(f"malformed message of {len(data)} bytes: {error}") from None


def to_failed(stream: int, error: Exception) -> Failed:
    """An error of the producer as a reply."""
    if isinstance(error, Unacceptable):
        return Failed(stream, "unacceptable", error.detail, error.stages)
    kinds: list[tuple[type[Exception], Code]] = [
        (LeaseLost, "lease"), (TransferTimeout, "timeout"), (FrameError, "refused"), (TransportError, "aborted"),
    ]  # fmt: skip
    code: Code = next((code for kind, code in kinds if isinstance(error, kind)), "aborted")
    return Failed(stream, code, f"{error}"[:1000].encode(errors="replace").decode())


def to_error(failed: Failed, peer: str) -> KVServeError:
    """The consumer's error for a reply."""
    if failed.code == "unacceptable":
        return Unacceptable(failed.stages, failed.detail)
    kind = {"lease": LeaseLost, "timeout": TransferTimeout, "aborted": PeerLost}.get(failed.code, TransportError)
    return kind(f"{peer}: {failed.detail}")
