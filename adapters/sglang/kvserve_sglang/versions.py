"""Which SGLang releases this adapter was tested against."""

from __future__ import annotations

import re

from kvserve_core.errors import PluginError

OLDEST, NEWEST = (0, 5, 21), (0, 5, 23)
WINDOW = f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"


def release(version: str) -> tuple[int, ...]:
    """The numbers of ``0.5.23``, ``0.5.23.post1`` or ``v0.5.23rc1``; what follows the third does not count."""
    numbers: list[int] = []
    for part in version.removeprefix("v").split(".")[:3]:
        found = re.match("[0-9]+", part)
        if found is None:
            break
        numbers.append(int(found[0]))
    return tuple(numbers)


def check_version(version: str) -> None:
    """Raise PluginError, naming the window, for a release outside of it."""
    if not OLDEST <= release(version) <= NEWEST:
        raise PluginError(
            f"SGLang {version!r} is outside the window {WINDOW} that kvserve was tested with; install a release within"
            " it, or a kvserve made for yours"
        )
