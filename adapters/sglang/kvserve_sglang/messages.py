"""What the ranks tell each other over SGLang's own control sockets: small, typed, and never code.

KV travels by the kvserve transport; SGLang's status and abort messages stay as they are.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from kvserve_core.errors import FrameError
from kvserve_core.peer import PeerInfo
from kvserve_core.policy import Outcome
from kvserve_core.transport import Endpoint

TAG = b"KVSERVE"


class Register(msgspec.Struct, frozen=True, tag=True):
    """Decode to prefill, once per pair of ranks: who I am and what I can read.

    holds: what the decode side stores, by name, so that a refusal can say what differs. exact: its prefix cache may
    give what arrives to other requests, so that only exact profiles will do.
    """

    ip: str
    port: int
    session: str
    peer: PeerInfo
    holds: dict[str, str]
    exact: bool = False


class Wanted(msgspec.Struct, frozen=True, tag=True):
    """Decode to prefill, per request: pages are ready here. Where they are stays here: the decode side writes them.

    ranks: how many decode ranks will ask this prefill rank. prefix: tokens that the decode side holds already.
    """

    room: int
    ip: str
    port: int
    session: str
    ranks: int
    prefix: int
    dummy: bool


class Located(msgspec.Struct, frozen=True, tag=True):
    """Prefill to decode, per request and rank: it can be fetched from here, while it is being encoded."""

    room: int
    prefill_rank: int
    transfer_id: str
    num_tokens: int
    endpoint: Endpoint
    profile: str


class Decided(msgspec.Struct, frozen=True, tag=True):
    """First prefill rank to the others: one decision per request."""

    room: int
    transfer_id: str
    profile: str
    reason: str
    link: str


class Reported(msgspec.Struct, frozen=True, tag=True):
    """The other prefill ranks to the first: what their part of a transfer cost."""

    prefill_rank: int
    outcome: Outcome


Message: TypeAlias = Register | Wanted | Located | Decided | Reported
_decoder = msgspec.json.Decoder(Message)


def pack(message: Message) -> list[bytes]:
    """As ZeroMQ frames."""
    return [TAG, msgspec.json.encode(message)]


def unpack(frames: list[bytes]) -> Message | None:
    """The message, or None for one of SGLang's own.

    Raises:
        FrameError: it has our tag and is malformed.
    """
    if not frames or frames[0] != TAG:
        return None
    try:
        return _decoder.decode(frames[1])
    except (msgspec.MsgspecError, IndexError) as error:
        raise FrameError(f"a control message cannot be read ({error}); run the same kvserve on both sides") from error
