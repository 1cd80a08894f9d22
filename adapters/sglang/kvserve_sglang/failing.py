"""How a room that failed ends, on both sides. Written out, as it moved between releases of the tested window."""

from __future__ import annotations

from typing import Any, NoReturn

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import KVTransferError

ENDED = (KVPoll.Success, KVPoll.Failed)


def raise_failure(of: Any) -> NoReturn:
    """What SGLang asks a sender or receiver for when its room failed: end it here, and raise the reason once."""
    of.conclude_state = KVPoll.Failed
    of.clear()
    with of.kv_mgr.failure_lock:
        reason = of.kv_mgr.failure_records.pop(of.bootstrap_room, None)
    raise KVTransferError(of.bootstrap_room, reason or "it failed on another rank", is_from_another_rank=reason is None)
