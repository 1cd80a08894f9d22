"""What the two processes of the demo say to each other beside the KV: the router's part, over a pipe."""

from __future__ import annotations

from dataclasses import dataclass

from kvserve_core.policy import Outcome
from kvserve_core.transport import Locator


@dataclass(frozen=True)
class SetLink:
    """Start over on a link: a new transport with this limit, a new controller with this prior."""

    max_bytes_per_s: float | None
    prior_bytes_per_s: float


@dataclass(frozen=True)
class Prefill:
    """Compute the KV of a prompt and keep it. Answer: :class:`Prefilled`."""

    prompt: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Prefilled:
    """The prompt's KV is held; what computing it took."""

    seconds: float


@dataclass(frozen=True)
class Publish:
    """Choose a profile (or take ``forced``), and publish the prompt's KV. Answer: :class:`Published`."""

    transfer_id: str
    prompt: str
    forced: str | None = None


@dataclass(frozen=True)
class Published:
    """Where to fetch, and why under this profile."""

    locator: Locator
    reason: str
    explained: str


@dataclass(frozen=True)
class Settle:
    """Wait for the consumer's report and let the controller learn from it. Answer: :class:`Outcome`."""

    transfer_id: str


@dataclass(frozen=True)
class Failure:
    """The other side could not do it."""

    error: str


Request = SetLink | Prefill | Publish | Settle
Answer = Prefilled | Published | Outcome | Failure | None
