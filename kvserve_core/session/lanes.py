"""Where a session works on a GPU: on streams of its own beside the engine's, of low priority or on few multiprocessors.

On a CPU everything here does nothing. docs/performance.md has what a budget costs and gains.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch

from kvserve_core.session.events import Event

log = logging.getLogger(__name__)


class Lane:
    """A stream for a session's kernels. ``sms``: multiprocessors that they may use, 0 for all.

    Its priority is the lowest, which is also that of a default stream: programs of a stream of a higher one come first,
    but none that runs is taken off. A budget (a green context) holds against any.
    """

    def __init__(self, device: torch.device, sms: int = 0) -> None:
        self.device = device
        self._stream = _stream(device, sms) if device.type == "cuda" else None
        self._beside = _stream(device, 0) if device.type == "cuda" else None

    def work(self) -> AbstractContextManager[object]:
        """Queue what follows on this lane."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def beside(self, mark: Event | None) -> AbstractContextManager[object]:
        """Queue what follows behind ``mark`` only: reading back must not wait for what was queued on the lane since."""
        if self._beside is None:
            return nullcontext()
        if mark is not None:
            self._beside.wait_event(cast(torch.cuda.Event, mark))
        return torch.cuda.stream(self._beside)

    def mark(self) -> Event | None:
        """What the calling thread's stream has queued so far."""
        return None if self._stream is None else torch.cuda.current_stream(self.device).record_event()

    def after(self, event: Event | None) -> None:
        """The lane waits for ``event``; the host does not, if it is CUDA's."""
        if event is None:
            return
        if self._stream is not None and isinstance(event, torch.cuda.Event):
            self._stream.wait_event(event)
        else:
            event.synchronize()

    def wait(self) -> None:
        """Until all that was queued on this lane is done; other streams go on, and so do other threads."""
        if self._stream is not None:
            self._stream.record_event().synchronize()


def _stream(device: torch.device, sms: int) -> torch.cuda.Stream:
    """A green context's stream for a budget; where this torch or driver has none, and for none, one of low priority."""
    if sms:
        try:
            return _green(device, sms)
        except (ImportError, AttributeError, RuntimeError) as error:
            log.warning("no budget of %d multiprocessors here, a stream of low priority instead: %s", sms, error)
    return torch.cuda.Stream(device, priority=0)  # type: ignore[no-untyped-call]  # torch does not annotate it


def _green(device: torch.device, sms: int) -> torch.cuda.Stream:
    from torch.cuda.green_contexts import GreenContext  # with streams from torch 2.11 on

    current = torch.cuda.current_device()
    made: Any = GreenContext.create(num_sms=sms, device_id=current if device.index is None else device.index)
    stream: torch.cuda.Stream = made.Stream()
    _KEPT.append(made)  # a stream lives as long as its context
    return stream


_KEPT: list[object] = []
