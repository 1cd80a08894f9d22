"""One published transfer: its plan, the tokens that are final so far, and the segments sealed so far."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from kvserve_core.errors import FrameError, PeerLost, TransferTimeout
from kvserve_core.pipeline import Pipeline
from kvserve_core.plan import Planned
from kvserve_core.policy import Outcome
from kvserve_core.spec import Region
from kvserve_core.wire import Codebook, Sealed, Segment


class Source:
    """A :class:`~kvserve_core.transport.SegmentSource` that the encode thread fills and transports read."""

    def __init__(self, pipeline: Pipeline, transfer_id: str, total: int, profile: str, link: str) -> None:
        self.pipeline, self.link = pipeline, link
        self.header, self._planned = pipeline.header(transfer_id, total, profile)
        self.plan: Sequence[Region] = [p.at for p in self._planned]
        self.address = ""
        self.held = 0
        self.closed: str | None = None
        self._codebook = Codebook(self.header)
        self._sealed: dict[int, Sealed] = {}
        self._final = bytearray(total)
        self._queued: set[int] = set()
        self._encode_s = 0.0
        self._freed = False
        self._changed = threading.Condition()

    @property
    def complete(self) -> bool:
        """Whether every segment is sealed."""
        return len(self._sealed) == len(self._planned)

    @property
    def wire_bytes(self) -> int:
        """Bytes of the segments sealed so far."""
        return sum(s.nbytes for s in self._sealed.values())

    def newly_final(self, tokens: range) -> list[Planned]:
        """Segments that can be encoded now that ``tokens`` are final too; each is given out once.

        Raises:
            ValueError: tokens outside the request.
        """
        total = len(self._final)
        if tokens.step != 1 or not 0 <= tokens.start <= tokens.stop <= total:
            raise ValueError(f"tokens {tokens} of a request with {total}")
        self._final[tokens.start : tokens.stop] = b"\1" * len(tokens)
        grid = self.pipeline.spec.segment_tokens
        done = {i for i in range(-(-total // grid)) if all(self._final[i * grid : (i + 1) * grid])}
        ready = [p for p in self._planned if p.index not in self._queued and self._cell(p, grid, total) in done]
        self._queued.update(p.index for p in ready)
        return ready

    def _cell(self, planned: Planned, grid: int, total: int) -> int:
        state = self.pipeline.kv.group(planned.at.group).unit == "state"
        return (total - 1) // grid if state else planned.at.start // grid

    def seal(self, segments: Sequence[Segment]) -> list[Sealed]:
        """The segments as bytes with digests."""
        return [self._codebook.seal(segment) for segment in segments]

    def add(self, sealed: Sequence[Sealed], encode_s: float) -> int:
        """Make segments available; returns their bytes."""
        with self._changed:
            self._sealed.update((s.index, s) for s in sealed)
            self._encode_s += encode_s
            self._changed.notify_all()
        return sum(s.nbytes for s in sealed)

    def get(self, index: int, deadline: float) -> Sealed:
        """The segment; waits until it is encoded (see :class:`~kvserve_core.transport.SegmentSource`)."""
        where = self.header.transfer_id
        if not 0 <= index < len(self._planned):
            raise FrameError(f"segment {index} of {len(self._planned)}", f"transfer {where!r}")
        with self._changed:
            while index not in self._sealed:
                if self.closed is not None:
                    raise PeerLost(f"transfer {where!r} was withdrawn: {self.closed}")
                if not self._changed.wait(deadline - time.monotonic()):
                    raise TransferTimeout(f"segment {index} of transfer {where!r} was not encoded in time")
            return self._sealed[index]

    def close(self, reason: str) -> None:
        """No more segments; waiting ``get`` calls raise."""
        with self._changed:
            if self.closed is None:
                self.closed = reason
            self._changed.notify_all()

    def mark_freed(self) -> bool:
        """True the first time only."""
        with self._changed:
            first, self._freed = not self._freed, True
            return first

    def outcome(self, reports: Sequence[Outcome] = ()) -> Outcome:
        """The producer's figures joined with the consumers' reports (the slowest rank counts)."""
        wire = self.wire_bytes
        return Outcome(
            transfer_id=self.header.transfer_id,
            profile=self.header.profile,
            raw_bytes=self.header.raw_bytes,
            wire_bytes=sum(r.wire_bytes for r in reports) or wire,
            encode_s=self._encode_s,
            transfer_s=max((r.transfer_s for r in reports), default=0.0),
            decode_s=max((r.decode_s for r in reports), default=0.0),
            total_s=max((r.total_s for r in reports), default=0.0),
            ok=all(r.ok for r in reports),
            reason="; ".join(r.reason for r in reports if r.reason),
            link=self.link,
        )
