"""Addresses of ``tcp``: ``tcp://10.0.0.5:5555`` or, for loopback, ``tcp://127.0.0.1:5555?host=<id of the machine>``."""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

from kvserve_core.errors import TransportError
from kvserve_plugins.transports._host import host_id

_HOST = re.compile(r"[\w.:%-]{1,255}", re.ASCII)


class Address(NamedTuple):
    """Where a producer listens. ``host_id`` is set where the name only means something on one machine."""

    host: str
    port: int
    host_id: str = ""

    @property
    def zmq(self) -> str:
        """As ZeroMQ takes it."""
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.zmq}?host={self.host_id}" if self.host_id else self.zmq


def is_loopback(host: str) -> bool:
    """Whether ``host`` can only be reached from the machine itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def is_wildcard(host: str) -> bool:
    """Whether ``host`` means every interface, which no consumer can connect to."""
    return host in ("*", "0.0.0.0", "::")


def is_host(text: str) -> bool:
    """Whether ``text`` can be a host name or an address: what neither end of an address can misread."""
    return _HOST.fullmatch(text) is not None


def published(host: str, port: int) -> Address:
    """The address to hand out."""
    return Address(host, port, host_id("net") if is_loopback(host) else "")


def parse(text: str, scheme: str = "tcp") -> Address:
    """An address out of a locator, refused early where it cannot lead to the producer.

    Raises:
        TransportError: malformed, or the loopback of another machine.
    """
    try:
        parts = urlsplit(text.removeprefix(f"{scheme}:"))  # urlsplit knows no scheme with an underscore
        found = Address(parts.hostname or "", parts.port or 0, parse_qs(parts.query).get("host", [""])[0])
    except ValueError:
        found = Address("", 0)
    if not text.startswith(f"{scheme}://") or not is_host(found.host) or not found.port:
        raise TransportError(
            f"{text!r} is not an address of {scheme!r}; expected for example '{scheme}://10.0.0.5:5555'"
        )
    if found.host_id and found.host_id != host_id("net"):
        raise TransportError(
            f"the locator names {found.zmq!r}, which is the producer's own loopback and leads nowhere from this host;"
            " set transport.tcp.bind (and transport.tcp.advertise behind NAT) on the producer"
        )
    return found
