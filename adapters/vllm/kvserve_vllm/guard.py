"""What a hook raises costs a transfer and never the engine: it is logged, counted, and the engine goes on."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from kvserve_vllm.stats import StatsBuffer

log = logging.getLogger(__name__)
T = TypeVar("T")


def guarded(default: Callable[[], T], name: str = "") -> Callable[[Callable[..., T]], Callable[..., T]]:
    """What a hook answers when it fails. name: of the engine's hook, where the method is called otherwise.

    The object that has the hook counts it in ``_hook_failed(name)``.
    """

    def decorate(hook: Callable[..., T]) -> Callable[..., T]:
        label = name or hook.__name__

        @functools.wraps(hook)
        def call(self: Any, *args: Any, **kwargs: Any) -> T:
            try:
                return hook(self, *args, **kwargs)
            except Exception:  # whatever went wrong, the engine goes on without this transfer
                log.exception("kvserve failed in %r; the engine goes on", label)
                self._hook_failed(label)
                return default()

        return call

    return decorate


def isolated(stats: StatsBuffer, hook: str, part: Callable[[], T], default: T) -> T:
    """Run one part of a hook: what the others order and answer must get through whatever it does."""
    try:
        return part()
    except Exception:  # nothing of one part may cost the requests of another
        log.exception("kvserve failed in a part of %r; the others go on", hook)
        stats.hook_failed(hook)
        return default
