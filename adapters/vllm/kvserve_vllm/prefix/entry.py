"""A request as the store half of the scheduler side follows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kvserve_core.policy import Decision, Outcome
from kvserve_core.requests import RequestOptions
from kvserve_vllm.arrival import Arrival
from kvserve_vllm.metadata import Blocks
from kvserve_vllm.prefix.keys import Keys
from kvserve_vllm.prefix.lookup import Hit


class Stage(Enum):
    """Where the load of a request is. DONE: loaded, failed or not needed; it is not tried again."""

    OPEN = "open"
    LOADING = "loading"
    DONE = "done"


@dataclass
class Entry:
    """A request. exact: it loads nothing that lost anything. stores: whether it may store.

    held: quality of the KV that it has, from what it loaded. done: cells in front that need no storing. told: the
    workers know of it. gone: it ended while it loaded. timing: when and at which token its prefill began, until timed.
    """

    request: Any
    options: RequestOptions
    keys: Keys
    exact: bool
    stores: bool
    arrival: Arrival
    stage: Stage = Stage.OPEN
    computed: int = 0
    hit: Hit | None = None
    looked_s: float = 0.0
    ranks: int = 0
    valid: int = 0
    failed: bool = False
    gone: bool = False
    held: float = 1.0
    done: int = 0
    told: bool = False
    seen: bool = False
    blocks: Blocks = ()
    decision: Decision | None = None
    timing: tuple[float, int] | None = None
    outcomes: list[Outcome] = field(default_factory=list)
