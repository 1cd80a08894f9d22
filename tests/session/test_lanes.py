"""Without a GPU a lane waits on the host, and nothing else."""

from __future__ import annotations

import torch

from kvserve_core.session.lanes import Lane

CPU = torch.device("cpu")


class HostEvent:
    def __init__(self) -> None:
        self.waited = 0

    def synchronize(self) -> None:
        self.waited += 1


def test_a_lane_on_a_cpu_waits_for_events_on_the_host() -> None:
    lane, event = Lane(CPU, sms=4), HostEvent()
    lane.after(event)
    assert event.waited == 1
    lane.after(None)
    assert lane.mark() is None


def test_work_on_a_cpu_is_done_when_it_is_queued() -> None:
    lane = Lane(CPU)
    with lane.work():
        x = torch.ones(4) * 2
    with lane.beside(lane.mark()):
        y = x + 1
    lane.wait()
    assert y.tolist() == [3.0] * 4
