"""When work on a GPU is over: a lock fences a thread, but kernels that it enqueued have yet to run."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class Fence:
    """The work that was enqueued on one request's pages, by stream. On a CPU work is over when it returns."""

    _events: dict[int, torch.cuda.Event] = field(default_factory=dict)

    def mark(self, device: torch.device) -> None:
        """What this thread enqueued on ``device`` so far belongs to the request. Call under the request's lock."""
        if device.type != "cuda":
            return
        stream = torch.cuda.current_stream(device)
        if stream.cuda_stream not in self._events:
            with torch.cuda.device(device):
                self._events[stream.cuda_stream] = torch.cuda.Event()
        self._events[stream.cuda_stream].record(stream)  # in place of the one before, which ends earlier

    def wait(self) -> None:
        """Until all of it is over. Call when nothing more can be marked."""
        for event in list(self._events.values()):
            event.synchronize()
