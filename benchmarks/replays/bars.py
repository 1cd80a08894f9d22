"""What a replay answers, and how a program of bars shows it."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Result:
    """One bar: what was found, what had to be, and whether it was. ``detail`` is for people."""

    value: Any
    bar: Any
    ok: bool
    detail: dict[str, Any] = field(default_factory=dict)


def check_only(parser: ArgumentParser, only: str, names: Iterable[str]) -> None:
    """Ends the program where ``--only`` picks nothing: of no bars all are met."""
    if not any(only in name for name in names):
        parser.error(f"--only {only!r} is a part of none of: {', '.join(names)}")


def shown(found: dict[str, Any], as_json: bool) -> int:
    """Print a report with its ``bars``; what the program ends with."""
    rows = [
        f"{'ok  ' if bar['ok'] else 'FAIL'} {name}: {bar['value']} (bar {bar['bar']})"
        for name, bar in found["bars"].items()
    ]
    print(json.dumps(found, indent=2) if as_json else "\n".join([*rows, f"ok {found['ok']}"]))
    return 0 if found["ok"] else 1
