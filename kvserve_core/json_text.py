"""JSON from outside: every way in which a text can fail to be JSON is a ValueError."""

from __future__ import annotations

import json
from typing import Any


def parsed(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is not JSON, not UTF-8, or nested too deep to read (of which Python says RecursionError).
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
