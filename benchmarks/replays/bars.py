"""What a replay answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Result:
    """One bar: what was found, what had to be, and whether it was. ``detail`` is for people."""

    value: Any
    bar: Any
    ok: bool
    detail: dict[str, Any] = field(default_factory=dict)
