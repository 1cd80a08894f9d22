"""Codec ``rans`` on a GPU: what the kernels of :mod:`~.triton_rans` need beside the blobs, and their launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvserve_core.tensor import Encoded, Part
from kvserve_plugins.kernels.nvcomp_layout import aligned, to_device
from kvserve_plugins.kernels.rans_header import MAX_STEPS
from kvserve_plugins.kernels.rans_model import COLUMN_BITS, FIRST_SIGMA, MAX_OFFSET, MAX_ROW, OCTAVE
from kvserve_plugins.kernels.rans_set import LOGISTIC, TableSet
from kvserve_plugins.kernels.rans_tables import CENTRE, RUNGS, SYMBOLS, TOTAL, ZERO

MANY = 1 << 16
"""Escapes that there is room for in any part; beyond, an eighth of its codes."""
SPILLED = 256
EACH, REGISTERS = 4, 0
"""Lanes a thread, and the most registers of one; 0: as many as the compiler takes."""


BLOCK = 256
SAMPLE = 16
"""One live row in so many tells which shapes fit."""
LANE_CODES = 1536
FEWEST, MOST = 5, 10
"""Lanes as powers of two, between which an encoder takes one for so many codes."""
WIDE, INSIDE = 16, 5
"""Slots a bucket, and how many symbols may begin inside of one."""


class DeviceTables:
    """A set of tables on the device, in a kilobyte each, so that they stay in the first-level cache.

    ``coding``, i32: for the 256 buckets of 16 slots of each of 69 tables, which of the table's symbols has the first
    slot, and from bit 5 on, five bits each, 16 less where others begin (``r`` more has bit 4 where slot ``r`` is at or
    behind it); then for the 32 symbols of each, without those that have no slots, ``count - 1 << 17 | start << 5 |
    symbol``. Where more than five symbols begin inside of a bucket, ``narrow`` is False, and it is what
    :attr:`TableSet.slots` is. radii: of tables 0..63.
    """

    def __init__(self, of: TableSet, device: torch.device) -> None:
        coding = _buckets(of)
        self.narrow = coding is not None
        self.coding = torch.from_numpy(of.slots.view(np.int32) if coding is None else coding).to(device)
        self.radii = torch.from_numpy(of.radius.astype(np.int32)).to(device)


def _buckets(of: TableSet) -> NDArray[np.int32] | None:
    buckets, symbols = [], []
    for counts, starts in zip(of.frequencies.astype(np.int64), of.starts.astype(np.int64), strict=True):
        there = np.flatnonzero(counts)
        begin = starts[there]
        firsts = np.arange(0, TOTAL, WIDE)
        line = np.searchsorted(begin, firsts, "right") - 1
        inside = [begin[(begin > f) & (begin < f + WIDE)] - f for f in firsts.tolist()]
        if max(map(len, inside)) > INSIDE:
            return None
        for i, places in enumerate(inside):
            line[i] |= sum(WIDE - int(place) << 5 * n + 5 for n, place in enumerate(places))
        buckets.append(line)
        symbols.append(np.pad((counts[there] - 1) << 17 | begin << 5 | there, (0, SYMBOLS - len(there))))
    return np.concatenate((*buckets, *symbols)).astype(np.int32)


def decoded(
    blobs: Sequence[Tensor], like: Sequence[Part], shapes: Sequence[tuple[int, int]], of: DeviceTables
) -> tuple[list[Tensor], Tensor]:
    """Codes of each part, and a flag for each on the device, u8: 0 where a blob was not in order.

    shapes: rows and columns of each.
    """
    device = of.radii.device
    ok = torch.ones(len(like), dtype=torch.uint8, device=device)
    out = [torch.empty(0, dtype=p.codes.dtype, device=device) for p in like]
    for kind in (torch.uint8, torch.int16):
        these = [i for i, p in enumerate(like) if p.codes.dtype is kind and p.codes.numel()]
        if these:
            made = _launched(these, blobs, like, shapes, of, ok)
            for i, codes in zip(these, made, strict=True):
                out[i] = codes
    return out, ok


def _launched(
    these: Sequence[int], blobs: Sequence[Tensor], like: Sequence[Part], shapes: Sequence[tuple[int, int]],
    of: DeviceTables, ok: Tensor,
) -> list[Tensor]:  # fmt: skip
    from kvserve_plugins.kernels.triton_rans import decode_kernel  # a CUDA build of torch brings Triton

    device, kind = of.radii.device, like[these[0]].codes.dtype
    counts = np.array([like[i].codes.numel() for i in these], np.int64)
    padded = -(-counts // 16) * 16
    whole = torch.empty(int(padded.sum()), dtype=kind, device=device)
    starts = np.cumsum(padded) - padded
    rows, columns = np.array([shapes[i] for i in these], np.int64).T
    sizes = np.array([blobs[i].numel() for i in these], np.int64)
    cap = np.where(counts <= MANY, counts, np.maximum(MANY, counts // 8))
    lanes = np.maximum(SPILLED, sizes // 4)
    room = 7 * (rows + 15) + columns + 15 + 96 + 4 * cap + lanes + 15
    room = room // 16 * 16
    table = np.stack((
        np.array([blobs[i].data_ptr() for i in these], np.int64), sizes, rows, columns,
        whole.data_ptr() + starts * whole.element_size(), np.array([like[i].alphabet for i in these], np.int64),
        np.cumsum(room) - room, cap, np.array(these, np.int64), lanes,
    ), 1)  # fmt: skip
    jobs = to_device(device, *table)
    scratch = torch.empty(int(room.sum()), dtype=torch.int32, device=device)
    lane_bits = sorted({lanes_for(n) for n in counts.tolist()})  # blobs of other encoders take the kernel for any
    others = sum(1 << b for b in lane_bits)
    given = (jobs, of.coding, of.radii, scratch, ok, others)
    for bits in (*lane_bits, -1):
        n = 1 << bits if bits >= 0 else SPILLED
        decode_kernel[(len(these),)](
            *given,
            lane_bits=bits,
            lanes=n,
            narrow=of.narrow,
            wide=kind is torch.int16,
            **(_spread(n) if bits >= 0 else {"each": 8, "num_warps": 1}),
        )
    return [whole[s : s + n] for s, n in zip(starts.tolist(), counts.tolist(), strict=True)]


class EncodingTables:
    """What an encoder needs of a set of tables, on the device."""

    def __init__(self, of: TableSet, device: torch.device) -> None:
        def on(x: NDArray[Any]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(x)).to(device)

        self.pairs = on(of.pairs.view(np.int32))
        self.inverses = on((1.0 / np.maximum(of.frequencies.reshape(-1), 1)).astype(np.float32))
        self.radii = on(of.radius.astype(np.int32))
        self.limits = on(_limits(of))
        self.ladder = on(of.ladder.reshape(-1))
        self.costs = on(np.pad(of.costs, ((0, 0), (0, 32 - RUNGS), (0, 15))).reshape(-1))
        sizes = np.arange(MAX_OFFSET + 1)
        self.column_table = _cheapest(of, np.exp(-(sizes**2) / 4.0))
        self.classes = {wide: _cheapest(of, 4.0 ** -np.maximum(np.arange(n) - 1, 0)) for wide, n in CLASSES.items()}


CLASSES = {False: 10, True: 16}
"""Classes of escapes from codes of one byte and of two, with 0, which is none."""


def _cheapest(of: TableSet, weights: NDArray[np.float64]) -> int:
    """The table that is best for values of magnitudes as frequent as this, among those that know all of them."""
    known = np.flatnonzero(of.radius[:ZERO] >= len(weights) - 1)
    return int(known[(of.bits[known, CENTRE : CENTRE + len(weights)] @ weights).argmin()])


def _limits(of: TableSet) -> NDArray[np.float32]:
    """``[64]``: mean magnitudes above which a row is on the next rung; the first one tells zeros from others."""
    shown = of.frequencies[LOGISTIC * RUNGS : 2 * RUNGS].astype(np.float64) / TOTAL
    size = np.abs(np.arange(SYMBOLS) - CENTRE)
    mean = np.array([(p * size).sum() for p in shown])
    sigma = FIRST_SIGMA * 2.0 ** (np.arange(MAX_ROW + 1) / OCTAVE)
    means = np.where(np.arange(MAX_ROW + 1) < 12, np.pad(mean, (0, MAX_ROW + 1 - RUNGS))[: MAX_ROW + 1], sigma / 1.25)
    between = np.sqrt(means[1:] * means[:-1])
    return np.concatenate(([0.0], np.maximum.accumulate(between), np.full(64 - len(means), np.inf))).astype(np.float32)


def lanes_for(codes: int) -> int:
    """Lanes that the encoder takes for so many codes, as a power of two."""
    wanted = max(codes // LANE_CODES, -(-codes // MAX_STEPS), 1)
    return min(max(wanted.bit_length() - 1, (-(-codes // MAX_STEPS) - 1).bit_length(), FEWEST), MOST)


def encoded(parts: Sequence[Part], shapes: Sequence[tuple[int, int]], of: EncodingTables) -> list[Encoded]:
    """A blob for each part. Its size, on the device, is that of the codes where it would have been that, or more."""
    device = of.radii.device
    totals = torch.zeros(len(parts), dtype=torch.int64, device=device)
    codes = [aligned(p.codes) for p in parts]
    room = np.array([-(-p.nbytes // 16) * 16 for p in parts], np.int64)
    blobs = torch.empty(int(room.sum()), dtype=torch.uint8, device=device)
    starts = np.cumsum(room) - room
    kinds: dict[tuple[int, torch.dtype], list[int]] = {}
    for i, p in enumerate(parts):
        if p.codes.numel() > MAX_STEPS << MOST:
            totals[i].fill_(p.nbytes)  # more than the lanes may code: as it stands
        elif p.codes.numel():
            kinds.setdefault((lanes_for(p.codes.numel()), p.codes.dtype), []).append(i)
    for (bits, kind), these in kinds.items():
        _encode(these, bits, kind is torch.int16, codes, parts, shapes, of, blobs, starts, totals)
    return list(map(Encoded, torch.split(blobs, room.tolist()), totals.unbind()))


def _encode(
    these: Sequence[int], bits: int, wide: bool, codes: Sequence[Tensor], parts: Sequence[Part],
    shapes: Sequence[tuple[int, int]], of: EncodingTables, blobs: Tensor, starts: NDArray[np.int64], totals: Tensor,
) -> None:  # fmt: skip
    from kvserve_plugins.kernels.triton_rans_encode import encode_kernel
    from kvserve_plugins.kernels.triton_rans_fit import columns_kernel, model_kernel, rows_kernel

    rows, columns = np.array([shapes[i] for i in these], np.int64).T
    counts = rows * columns
    limit = np.array([parts[i].nbytes for i in these], np.int64)
    cap = np.where(counts <= MANY, counts, np.maximum(MANY, counts // 8))
    words = limit // 2 + (1 << bits)
    room = 32 + 6 * (rows + 15) + 2 * (columns + 15) + 128 + 3 * cap + words // 2 + 64
    room = room // 16 * 16
    table = np.stack((
        np.array([codes[i].data_ptr() for i in these], np.int64), rows, columns,
        np.array([parts[i].alphabet for i in these], np.int64), np.cumsum(room) - room, cap,
        blobs.data_ptr() + starts[list(these)], limit, np.array(these, np.int64), words,
    ), 1)  # fmt: skip
    jobs = to_device(of.radii.device, *table)
    scratch = torch.empty(int(room.sum()), dtype=torch.int32, device=of.radii.device)
    n = len(these)
    rows_kernel[(n, -(-int(rows.max()) // 16))](jobs, of.limits, scratch, wide=wide, block=BLOCK, num_warps=4)
    columns_kernel[(n, -(-int(columns.max()) // 64))](jobs, of.ladder, scratch, wide=wide, block=64, num_warps=4)
    model_kernel[(n,)](
        jobs, of.limits, of.costs, of.radii, scratch, of.column_table, of.classes[wide], SAMPLE, wide=wide, n=BLOCK,
        offset_bits=COLUMN_BITS, num_warps=4,
    )  # fmt: skip
    encode_kernel[(n,)](
        jobs, of.pairs, of.inverses, of.radii, scratch, totals, lane_bits=bits, wide=wide, **_spread(1 << bits)
    )  # fmt: skip


def _spread(lanes: int) -> dict[str, int]:
    """Lanes a thread, threads, and registers of each, so that many parts share a multiprocessor."""
    each = min(EACH, lanes // 32)
    limit = {"maxnreg": REGISTERS} if REGISTERS and lanes > 32 * EACH else {}
    return {"each": each, "num_warps": lanes // (32 * each), **limit}


class Kernels:
    """Both ways of the codec on one device."""

    def __init__(self, of: TableSet, device: torch.device) -> None:
        self._decoding, self._encoding = DeviceTables(of, device), EncodingTables(of, device)

    def encode(self, parts: Sequence[Part], shapes: Sequence[tuple[int, int]]) -> list[Encoded]:
        """See :func:`encoded`."""
        return encoded(parts, shapes, self._encoding)

    def decode(
        self, blobs: Sequence[Tensor], like: Sequence[Part], shapes: Sequence[tuple[int, int]]
    ) -> tuple[list[Tensor], Tensor]:
        """See :func:`decoded`."""
        return decoded([aligned(b) for b in blobs], like, shapes, self._decoding)
