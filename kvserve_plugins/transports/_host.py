"""An id of this machine as far as loopback addresses or process ids mean the same thing."""

from __future__ import annotations

import os
import socket
import uuid
from functools import lru_cache
from pathlib import Path

from blake3 import blake3


@lru_cache(maxsize=4)
def host_id(namespace: str) -> str:
    """16 hex digits: equal for processes of one boot of one machine that share ``namespace`` (``net`` or ``pid``).

    Containers of one host have loopback interfaces and process ids of their own, so the host alone does not do.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        inside = os.readlink(f"/proc/self/ns/{namespace}")
    except OSError:  # no procfs: name and hardware address are what is left
        boot, inside = socket.gethostname(), f"{uuid.getnode():x}"
    return blake3(f"{boot} {inside}".encode()).hexdigest()[:16]
