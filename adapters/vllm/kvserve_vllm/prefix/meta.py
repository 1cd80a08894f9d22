"""What crosses between scheduler and workers for stored prefixes. A cell is ``SEGMENT_TOKENS`` tokens of the prompt."""

from __future__ import annotations

from dataclasses import dataclass

from kvserve_core.policy import Decision, Outcome

Names = tuple[str, ...]
"""Names of one cell's objects in the store, by rank: each rank keeps its part under a name of its own."""


@dataclass(frozen=True)
class PrefixStore:
    """Keep cells of a request that this step's forward pass makes final. cells: names by the number of the cell."""

    req_id: str
    blocks: tuple[list[int], ...]
    decision: Decision
    cells: dict[int, Names]


@dataclass(frozen=True)
class PrefixLoad:
    """Load tokens ``[start, stop)`` of a prompt. wait: before the forward pass of this step."""

    req_id: str
    start: int
    stop: int
    cells: dict[int, Names]
    blocks: tuple[list[int], ...]
    profile: str
    wait: bool


@dataclass(frozen=True)
class PrefixStored:
    """How the storing of an object ended on one rank; ``outcome`` is None where it failed."""

    name: str
    outcome: Outcome | None
    reason: str = ""


@dataclass(frozen=True)
class PrefixLoaded:
    """How a load ended on one rank. valid: tokens ``[0, valid)`` of the prompt are in place."""

    req_id: str
    valid: int
    outcome: Outcome
    reason: str = ""
