"""Headers on their way through: every line as it is, byte for byte, but those that are about one connection."""

from __future__ import annotations

from collections.abc import Iterable
from uuid import uuid4

from kvserve_vllm.proxy.service import PREFIX

Lines = list[tuple[bytes, bytes]]
OF_THE_CONNECTION = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer"),
        *(b"transfer-encoding", b"upgrade"),
    }
)
"""RFC 9110, 7.6.1; a ``connection`` line may name more."""
OURS = frozenset({b"host", b"content-length", b"accept-encoding"})
"""Lines of a request that the next hop's client writes itself."""
REQUEST_ID = b"x-request-id"


def forwarded(lines: Iterable[tuple[bytes, bytes]]) -> Lines:
    """A client's headers as a server gets them, with an id for the request where it has none."""
    kept = [
        (name, value) for name, value in end_to_end(lines) if name not in OURS and not name.startswith(PREFIX.encode())
    ]
    if not any(name == REQUEST_ID for name, _ in kept):
        kept.append((REQUEST_ID, uuid4().hex.encode()))
    return [*kept, (b"accept-encoding", b"identity")]


def as_json(lines: Lines) -> Lines:
    """The same for a body that this proxy wrote."""
    return [*(line for line in lines if line[0] != b"content-type"), (b"content-type", b"application/json")]


def returned(lines: Iterable[tuple[bytes, bytes]], server: str) -> Lines:
    """A server's headers as the client gets them. A redirect to the server itself is one to this proxy."""
    kept = [(name, value) for name, value in end_to_end(lines) if name not in (b"date", b"server")]
    own = server.encode()
    return [(n, v.removeprefix(own) if n == b"location" and v.startswith(own + b"/") else v) for n, v in kept]


def end_to_end(lines: Iterable[tuple[bytes, bytes]]) -> Lines:
    """All lines that are for the other end, names in lower case."""
    small = [(name.lower(), value) for name, value in lines]
    named = {part.strip().lower() for name, value in small if name == b"connection" for part in value.split(b",")}
    dropped = OF_THE_CONNECTION | named
    return [(name, value) for name, value in small if name not in dropped]
