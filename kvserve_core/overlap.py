"""The two forms of eq. 1: stages one after another, or overlapped chunk by chunk. Pure functions.

A pipeline of three stages over n equal chunks takes as long as its slowest stage, plus one chunk through the others::

    T_p = T_model + M + (enc + transfer + dec - M) / n,     M = max(enc, transfer, dec)

Over x = 1/B that is two lines: up to the x at which the transfer becomes the slowest stage, and from it on.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Room = tuple[Floats, Floats]
"""For the weights of :meth:`Form.latencies` and what comes of them: to make it takes as long as to use it."""


def room_for(costs: Floats) -> Room:
    """Room for the latencies of so many profiles."""
    return np.ones(len(costs)), np.empty(costs.shape[1])


@dataclass(frozen=True, slots=True)
class Form:
    """``chunk_bytes``: original bytes that go through encode, transfer and decode at a time; None: all of V.

    stored: what is reckoned is reading from a store, for which nobody waits while it is encoded.
    """

    chunk_bytes: float | None = None
    stored: bool = False

    def chunks(self, nbytes: float) -> float:
        """n of V bytes, at least 1; a last chunk that is not full counts as the share that it is."""
        return max(1.0, nbytes / self.chunk_bytes) if self.chunk_bytes else 1.0

    def seconds(self, encode_s: float, transfer_s: float, decode_s: float, nbytes: float) -> float:
        """All stages that are waited for together, without T_model."""
        if self.stored:
            encode_s = 0.0
        whole = encode_s + transfer_s + decode_s
        if not self.chunk_bytes or whole == inf:  # of the latter nothing can be taken off
            return whole
        slowest = max(encode_s, transfer_s, decode_s)
        return slowest + (whole - slowest) / self.chunks(nbytes)

    def latencies(self, costs: Floats, nbytes: float, raw_s: float, room: Room) -> Floats:
        """The seconds of :meth:`lines` alone; where stages follow each other they are written into ``room``."""
        if self.chunk_bytes:
            return self.lines(costs, nbytes, raw_s)[0]
        weights, seconds = room
        weights[0], weights[4] = raw_s, nbytes
        if self.stored:
            weights[1] = weights[2] = 0.0
        else:
            weights[2] = nbytes
        return weights.dot(costs, seconds)

    def slopes(self, costs: Floats, nbytes: float, raw_s: float) -> Floats:
        """The slopes of :meth:`lines` alone."""
        return self.lines(costs, nbytes, raw_s)[1] if self.chunk_bytes else costs[0]

    def lines(self, costs: Floats, nbytes: float, raw_s: float) -> tuple[Floats, Floats]:
        """Seconds of many profiles, and how steeply they rise with ``raw_s``, the time that V takes uncompressed.

        costs: ``[5, P]``, bytes on the wire, encoding fixed and per byte, decoding fixed and per byte.
        """
        if not self.chunk_bytes:
            return self.latencies(costs, nbytes, raw_s, room_for(costs)), costs[0]
        wire, encode_s, decode_s = costs[0], costs[1] + costs[2] * nbytes, costs[3] + costs[4] * nbytes
        if self.stored:
            encode_s = np.zeros_like(decode_s)
        return _overlapped(wire, encode_s, wire * raw_s, decode_s, self.chunks(nbytes))


SEQUENTIAL = Form()
"""Stages one after another, all of them waited for."""


def _overlapped(
    wire: Floats, encode_s: Floats, transfer_s: Floats, decode_s: Floats, chunks: float
) -> tuple[Floats, Floats]:
    """Seconds and slopes: the link counts in full where it is the slowest stage, with one chunk where it is not."""
    slowest = np.maximum(np.maximum(encode_s, decode_s), transfer_s)
    seconds = slowest + (encode_s + transfer_s + decode_s - slowest) / chunks
    return seconds, np.where(transfer_s >= slowest, wire, wire / chunks)
