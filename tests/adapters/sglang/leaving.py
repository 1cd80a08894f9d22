"""Hooks of pytest, for every suite that imports SGLang."""

from __future__ import annotations

import os
import sys

import pytest

_ended_with = 0


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """What :func:`pytest_unconfigure` leaves with."""
    del session
    globals()["_ended_with"] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Leave without the interpreter's own clean-up: with SGLang imported on a CPU it ends in a segmentation fault, also
    when no test was run."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_ended_with)
