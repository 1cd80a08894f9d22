"""One unit system: bytes, seconds and bytes/s of original bytes. Text with units is parsed at the edge only.

``25Gbps`` and ``100Mbps`` are bits (1e9, 1e6); ``300GB/s`` is decimal bytes; ``56MiB`` is binary bytes. In text a size
may be a bare number of bytes; bandwidths and durations need their unit.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Annotated

from pydantic import BeforeValidator

from kvserve_core.errors import ConfigError

_NUMBER = re.compile(r"\s*((?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]*)\s*")
_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_SIZE = {p + "B": f for p, f in (_DECIMAL | _BINARY).items()}
_RATE = (
    {p + "bps": f / 8 for p, f in _DECIMAL.items()}
    | {p + "bit/s": f / 8 for p, f in _DECIMAL.items()}
    | {p + "B/s": f for p, f in (_DECIMAL | _BINARY).items()}
)
_LARGEST = sys.float_info.max
_TIME = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


def _parse(text: object, table: dict[str, float], what: str, bare: str, example: str) -> float:
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        value: float = text
    else:
        match = _NUMBER.fullmatch(text) if isinstance(text, str) else None
        number, unit = match.groups() if match else ("", "")
        if match and not unit and not bare and 0 < float(number) <= _LARGEST:  # 0 is 0 in any unit
            raise ConfigError(f"{what} {text!r} has no unit; write for example {example}")
        factor = table.get(unit or bare or next(iter(table))) if match else None
        if factor is None:
            raise ConfigError(f"{what} {text!r} is not understood; write for example {example}")
        value = float(number) * factor
    if not 0 <= value <= _LARGEST:
        raise ConfigError(f"{what} {text!r} must be a finite number of at least 0, for example {example}")
    return value


def parse_bandwidth(text: object) -> float:
    """Bytes per second from ``"25Gbps"`` or ``"300GB/s"``, or a number that is no text (bytes/s).

    Raises:
        ConfigError: the text has no known unit, or none: of a bandwidth people mean bits as often as bytes.
    """
    return float(_parse(text, _RATE, "bandwidth", "", "'25Gbps' or '300GB/s'"))


def parse_bytes(text: object) -> int:
    """Bytes from ``"56MiB"``, ``"4GB"`` or a plain number.

    Raises:
        ConfigError: the text has no known unit.
    """
    return int(_parse(text, _SIZE, "size", "B", "'56MiB' or '4GB'"))


def parse_duration(text: object) -> float:
    """Seconds from ``"200ms"`` or ``"2s"``, or a number that is no text.

    Raises:
        ConfigError: the text has no known unit, or none: of a latency people mean milliseconds as often as seconds.
    """
    return float(_parse(text, _TIME, "duration", "", "'200ms' or '2s'"))


def _scaled(value: float, steps: list[tuple[float, str]]) -> str:
    factor, unit = next((s for s in steps if value >= s[0]), steps[-1])
    return f"{value / factor:.4g} {unit}"


def format_bandwidth(bytes_per_s: float | None) -> str:
    """``2.5e6`` -> ``20 Mbps``; None or infinity -> ``unlimited``."""
    if bytes_per_s is None or bytes_per_s == float("inf"):
        return "unlimited"
    return _scaled(bytes_per_s * 8, [(1e12, "Tbps"), (1e9, "Gbps"), (1e6, "Mbps"), (1e3, "kbps"), (1.0, "bps")])


def format_bytes(nbytes: float) -> str:
    """``58720256`` -> ``56 MiB``."""
    return _scaled(nbytes, [(2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")])


def format_duration(seconds: float) -> str:
    """``0.0021`` -> ``2.1 ms``."""
    return _scaled(seconds, [(1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")])


def _or_value_error(parse: Callable[[object], float]) -> BeforeValidator:
    def check(value: object) -> object:
        try:
            return parse(value)
        except ConfigError as error:  # pydantic collects ValueError and keeps the field's path
            raise ValueError(error.reason) from None

    return BeforeValidator(check)


Bandwidth = Annotated[float, _or_value_error(parse_bandwidth)]
"""Pydantic field type: bytes/s, given as text with a unit or a number."""
Size = Annotated[int, _or_value_error(parse_bytes)]
"""Pydantic field type: bytes."""
Duration = Annotated[float, _or_value_error(parse_duration)]
"""Pydantic field type: seconds."""
