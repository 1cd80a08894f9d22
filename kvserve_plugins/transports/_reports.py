"""A consumer's report as it may enter the producer: figures that can be true, texts that are bounded."""

from __future__ import annotations

import math
from dataclasses import replace

from kvserve_core.policy import Outcome

MAX_REASON = 256
MAX_NAME = 1024
MAX_BYTES = 2**62
MAX_S = 1e7
"""Seconds; four months are no duration of a transfer."""


def plausible(report: Outcome | None) -> list[Outcome]:
    """The report with its reason cut to length; nothing where a figure is negative, not finite or absurd.

    One such figure discredits the others, so that nothing of it is kept: the controller would learn from it.
    """
    if report is None:
        return []
    durations = (report.encode_s, report.transfer_s, report.decode_s, report.total_s)
    sizes = (report.raw_bytes, report.wire_bytes)
    names = (report.transfer_id, report.profile, report.link)
    sound = (
        all(math.isfinite(s) and 0 <= s <= MAX_S for s in durations)
        and all(0 <= n <= MAX_BYTES for n in sizes)
        and all(len(name) <= MAX_NAME for name in names)
    )
    return [replace(report, reason=report.reason[:MAX_REASON])] if sound else []
