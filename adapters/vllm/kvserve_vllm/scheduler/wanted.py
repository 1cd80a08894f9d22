"""A request that is to be offered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvserve_vllm.arrival import Arrival
from kvserve_vllm.metadata import Blocks
from kvserve_vllm.params import TransferParams


@dataclass
class Wanted:
    """A request that asks to be offered.

    total: tokens to send. prompt: its digest. started_s, started_at: when its prefill was first scheduled, on the
    monotonic clock, and at which token. transfer_id: None while nothing is open. profile: what it is open with. failed:
    it is open in name only, so that the workers hand its blocks back. blocks: all of them. computed: tokens scheduled.
    loads: reports to come of a load that ends within the step that computes on. not_loaded: that load failed.
    """

    request: Any
    params: TransferParams
    total: int
    prompt: str | None
    arrival: Arrival
    started_s: float = 0.0
    started_at: int = 0
    attempts: int = 0
    transfer_id: str | None = None
    profile: str = ""
    failed: bool = False
    blocks: Blocks = ()
    announced: int = 0
    computed: int = 0
    loads: int = 0
    not_loaded: bool = False


def leave_last_token(request: Any) -> None:
    """Stop the prefill one token short: recurrent state must be that of the tokens that are sent, not one more.

    The decode engine computes the last prompt token itself. What prefill samples instead is nobody's answer.
    """
    del request.prompt_token_ids[-1:]
    del request._all_token_ids[-1:]
    request.num_prompt_tokens -= 1
    request.max_tokens = 1
