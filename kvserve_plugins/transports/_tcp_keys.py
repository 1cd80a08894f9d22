"""CURVE keys of ``tcp`` in a folder: encrypted connections, and only consumers whose key lies there are served."""

from __future__ import annotations

import os
from pathlib import Path

import zmq
import zmq.auth
from zmq.utils import z85

from kvserve_core.errors import ConfigError

SERVER, CLIENT = "server", "client"
_ZAP_VERSION = b"1.0"


def create_keys(folder: Path) -> None:
    """Write ``server`` and ``client`` key pairs (``NAME.key``, ``NAME.key_secret``), readable by the owner only.

    Producers need ``server.key_secret`` and the ``.key`` of each consumer, consumers ``server.key`` and
    ``client.key_secret``; copying the whole folder to both sides is the simple way.

    Raises:
        ConfigError: the folder holds keys, whose copies elsewhere would no longer match.
    """
    if any(folder.glob("*.key_secret")):
        raise ConfigError(f"{str(folder)!r} holds keys already; delete them, or name another folder")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in (SERVER, CLIENT):
        for path in zmq.auth.create_certificates(folder, name):
            os.chmod(path, 0o600)


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        return zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read the key {str(path)!r}: {error}; make keys with"
            " kvserve_plugins.transports.tcp.create_keys(folder) and copy the folder to both sides",
            "transport.tcp.key_dir",
        ) from error


def secure_server(socket: zmq.Socket[bytes], folder: Path) -> None:
    """Make a listening socket ask for CURVE."""
    socket.curve_publickey, socket.curve_secretkey = _pair(folder / f"{SERVER}.key_secret")
    socket.curve_server = True
    socket.zap_domain = b"kvserve"


def secure_client(socket: zmq.Socket[bytes], folder: Path) -> None:
    """Make a connecting socket speak CURVE to the server of this folder only."""
    socket.curve_publickey, socket.curve_secretkey = _pair(folder / f"{CLIENT}.key_secret")
    socket.curve_serverkey = _load(folder / f"{SERVER}.key")[0]


def _pair(path: Path) -> tuple[bytes, bytes]:
    public, secret = _load(path)
    if secret is None:
        raise ConfigError(f"{str(path)!r} holds no secret key", "transport.tcp.key_dir")
    return public, secret


class Doorkeeper:
    """Answers ZeroMQ's authentication requests (ZAP) in the server's own loop: no thread, no global handler."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: Path) -> None:
        keys = [path for path in folder.glob("*.key") if path.stem != SERVER]
        self._known = {z85.decode(_load(path)[0]) for path in keys}
        self.socket = context.socket(zmq.REP)
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        """Admit or refuse one consumer by its public key."""
        version, request, _domain, _address, _identity, mechanism, *credentials = self.socket.recv_multipart()
        known = version == _ZAP_VERSION and mechanism == b"CURVE" and credentials[:1] and credentials[0] in self._known
        status = [b"200", b"OK"] if known else [b"400", b"unknown key"]
        self.socket.send_multipart([_ZAP_VERSION, request, *status, b"", b""])
