"""One published transfer: its plan, the tokens that are final so far, and the segments sealed so far."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import cached_property

from kvserve_core.errors import ConfigError, FrameError, PeerLost, TransferTimeout
from kvserve_core.pipeline import MAX_NAME, Pipeline
from kvserve_core.plan import Planned
from kvserve_core.policy import Outcome
from kvserve_core.session.sealing import Hasher, seal_all
from kvserve_core.spec import Region
from kvserve_core.wire import Codebook, FrameHeader, Sealed, Segment


class Source:
    """A :class:`~kvserve_core.transport.SegmentSource` that the encode thread fills and transports read.

    The header and the plan are made when first asked for, which is not in the engine's thread.

    start: the first token of the first cell that is encoded; the consumer holds what is before it.
    """

    def __init__(
        self, pipeline: Pipeline, transfer_id: str, total: int, profile: str, link: str, start: int = 0
    ) -> None:
        if total < 1:
            raise ConfigError(f"transfer {transfer_id!r} has {total} tokens; at least 1 is needed")
        if not 1 <= len(transfer_id.encode()) <= MAX_NAME:
            raise ConfigError(
                f"transfer id {transfer_id[:32]!r} has {len(transfer_id)} characters; use 1 to {MAX_NAME}"
            )
        self.pipeline, self.transfer_id, self.link = pipeline, transfer_id, link
        self.raw_bytes = pipeline.raw_bytes(total, start)
        self.address = ""
        self.closed: str | None = None
        self.wire_bytes = 0
        self._total, self._profile, self._start = total, profile, start
        self._sealed: dict[int, Sealed] = {}
        self._final = bytearray(total)
        self._cells_given: set[int] = set()
        self._encode_s = 0.0
        self._freed = False
        self._changed = threading.Condition()
        self._making = threading.Lock()

    @cached_property
    def _made(self) -> tuple[FrameHeader, list[Planned]]:
        return self.pipeline.header(self.transfer_id, self._total, self._profile, self._start)

    def _make(self) -> tuple[FrameHeader, list[Planned]]:
        with self._making:
            return self._made

    @property
    def header(self) -> FrameHeader:
        """Of the whole frame."""
        return self._make()[0]

    @cached_property
    def plan(self) -> Sequence[Region]:
        """The region of every segment, by index."""
        return [p.at for p in self._make()[1]]

    @cached_property
    def _codebook(self) -> Codebook:
        return Codebook(self.header)

    @cached_property
    def _by_cell(self) -> dict[int, list[Planned]]:
        cells: dict[int, list[Planned]] = {}
        for p in self._make()[1]:
            cells.setdefault(self._cell(p), []).append(p)
        return cells

    @property
    def complete(self) -> bool:
        """Whether every segment is sealed."""
        return len(self._sealed) == self.header.num_segments

    def newly_final(self, tokens: range) -> list[Planned]:
        """Segments that can be encoded now that ``tokens`` are final too; each is given out once.

        Raises:
            ValueError: tokens outside the request.
        """
        if tokens.step != 1 or not 0 <= tokens.start <= tokens.stop <= self._total:
            raise ValueError(f"tokens {tokens} of a request with {self._total}")
        self._final[tokens.start : tokens.stop] = b"\1" * len(tokens)
        grid = self.pipeline.spec.segment_tokens
        touched = range(tokens.start // grid, -(-tokens.stop // grid))
        done = [i for i in touched if i not in self._cells_given and all(self._final[i * grid : (i + 1) * grid])]
        self._cells_given.update(done)
        return [p for i in done for p in self._by_cell.get(i, ())]

    def _cell(self, planned: Planned) -> int:
        grid = self.pipeline.spec.segment_tokens
        state = self.pipeline.kv.group(planned.at.group).unit == "state"
        return (self._total - 1) // grid if state else planned.at.start // grid

    def seal(self, segments: Sequence[Segment], hasher: Hasher) -> list[Sealed]:
        """The segments as bytes with digests."""
        return seal_all(self._codebook, segments, hasher)

    def add(self, sealed: Sequence[Sealed], encode_s: float) -> None:
        """Make segments available."""
        with self._changed:
            self._sealed.update((s.index, s) for s in sealed)
            self.wire_bytes += sum(s.nbytes for s in sealed)
            self._encode_s += encode_s
            self._changed.notify_all()

    def get(self, index: int, deadline: float) -> Sealed:
        """The segment; waits until it is encoded (see :class:`~kvserve_core.transport.SegmentSource`)."""
        if not 0 <= index < self.header.num_segments:
            raise FrameError(f"segment {index} of {self.header.num_segments}", f"transfer {self.transfer_id!r}")
        with self._changed:
            while index not in self._sealed:
                if self.closed is not None:
                    raise PeerLost(f"transfer {self.transfer_id!r} was withdrawn: {self.closed}")
                if not self._changed.wait(deadline - time.monotonic()):
                    raise TransferTimeout(f"segment {index} of transfer {self.transfer_id!r} was not encoded in time")
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
        return Outcome(
            transfer_id=self.transfer_id,
            profile=self._profile,
            raw_bytes=sum(r.raw_bytes for r in reports) if reports else self.raw_bytes,
            wire_bytes=sum(r.wire_bytes for r in reports) if reports else self.wire_bytes,
            encode_s=self._encode_s,
            transfer_s=max((r.transfer_s for r in reports), default=0.0),
            decode_s=max((r.decode_s for r in reports), default=0.0),
            total_s=max((r.total_s for r in reports), default=0.0),
            ok=all(r.ok for r in reports),
            reason="; ".join(r.reason for r in reports if r.reason),
            link=self.link,
        )
