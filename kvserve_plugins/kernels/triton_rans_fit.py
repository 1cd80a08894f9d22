"""The choices of an encoder of ``rans`` on a GPU: a rung for each row, offsets of columns, a shape for each rung.

Any encoder may choose in its own way. This one takes rungs from sums of magnitudes instead of costs of all rungs, and
shapes from a sample of rows, so that codes are read three times. A job, ten i64, is one part: address of its codes,
rows, columns, alphabet, where its scratch begins, escapes that fit there, address of its blob, bytes that it may have,
its number, words that fit into its scratch. Scratch, i32: 32 of the header and the model, then of ``rows``, rounded up
to 16: rungs, live rows, their rungs, three lists of those with low bits; ``columns`` offsets and gains; 64 tables by
rung and 64 more; three lists of escapes; words.
"""

import triton
import triton.language as tl

TOP = tl.constexpr(17)
ROWS = tl.constexpr(16)
MIN_ROWS = tl.constexpr(16)
MAX_OFFSET = tl.constexpr(6)
MOST_COLUMNS = tl.constexpr(4096)


@triton.jit
def codes_of(job, wide: tl.constexpr):
    """Where the codes of a part are, of one byte or two each."""
    if wide:
        return tl.multiple_of(tl.load(job).to(tl.pointer_type(tl.int16)), 16)
    else:
        return tl.multiple_of(tl.load(job).to(tl.pointer_type(tl.uint8)), 16)


@triton.jit
def magnitudes(codes, rungs, r, t, on, columns, centre):
    """Magnitudes, 16 for all above, of what remains of codes without their low bits; and the rungs that go with it."""
    p = tl.load(rungs + r, mask=on, other=-1)
    low = tl.where(p > TOP, (p - 15) // 3, 0)
    q = tl.load(codes + r.to(tl.int64) * columns + t, mask=on, other=0).to(tl.int32) - centre
    h = (q + ((1 << low) >> 1)) >> low
    return tl.minimum(tl.abs(h), 16), p - 3 * low, on & (p >= 0)


@triton.jit
def rows_kernel(jobs, limits, scratch, wide: tl.constexpr, block: tl.constexpr):
    """Program (p, b): rungs of 16 rows of part p, from 64 ``limits`` of the mean magnitude; -1 for zeros."""
    job = jobs + 10 * tl.program_id(0)
    rows, columns = tl.load(job + 1).to(tl.int32), tl.load(job + 2).to(tl.int32)
    if tl.program_id(1) * ROWS < rows:
        codes = codes_of(job, wide)
        centre = (tl.load(job + 3).to(tl.int32) - 1) // 2
        r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        sums = tl.zeros([ROWS, block], tl.float32)
        at = codes + r.to(tl.int64)[:, None] * columns + tl.arange(0, block)[None, :]
        for t in range(0, columns, block):
            on = (r < rows)[:, None] & (t + tl.arange(0, block) < columns)[None, :]
            q = tl.load(at + t, mask=on, other=0).to(tl.int32) - centre
            sums += tl.where(on, tl.abs(q), 0).to(tl.float32)
        mean = tl.sum(sums, 1) / columns
        above = (mean[:, None] > tl.load(limits + tl.arange(0, 64))[None, :]).to(tl.int32)
        tl.store(scratch + tl.load(job + 4) + 32 + r, tl.sum(above, 1) - 1, mask=r < rows)


@triton.jit
def columns_kernel(jobs, ladder, scratch, wide: tl.constexpr, block: tl.constexpr):
    """Program (p, b): offsets of ``block`` columns of part p, at the bottom of a parabola through three costs, and
    what they gain."""
    job = jobs + 10 * tl.program_id(0)
    rows, columns = tl.load(job + 1).to(tl.int32), tl.load(job + 2).to(tl.int32)
    t = tl.program_id(1) * block + tl.arange(0, block)
    if (tl.program_id(1) * block < columns) & (columns <= MOST_COLUMNS):
        codes = codes_of(job, wide)
        centre = (tl.load(job + 3).to(tl.int32) - 1) // 2
        scratch += tl.load(job + 4)
        rungs = scratch + 32
        room = (rows + 15) // 16 * 16
        below, here = tl.zeros([ROWS, block], tl.float32), tl.zeros([ROWS, block], tl.float32)
        above = tl.zeros([ROWS, block], tl.float32)
        for first in range(0, rows, ROWS):
            r = (first + tl.arange(0, ROWS))[:, None]
            m, p, on = magnitudes(codes, rungs, r, t[None, :], (r < rows) & (t < columns)[None, :], columns, centre)
            at = ladder + (p + 8) * 17 + m
            below += tl.load(at - 34, mask=on, other=0.0)
            here += tl.load(at, mask=on, other=0.0)
            above += tl.load(at + 34, mask=on, other=0.0)
        a, b, c = tl.sum(below, 0), tl.sum(here, 0), tl.sum(above, 0)
        bend = tl.maximum(a + c - 2 * b, 1e-3)
        least = tl.floor((a - c) / bend + 0.5).to(tl.int32)
        least = tl.minimum(tl.maximum(least, -MAX_OFFSET), MAX_OFFSET)
        gain = tl.where(least != 0, (a - c) * (a - c) / (8 * bend), 0.0)
        offsets = scratch + 32 + 6 * room
        tl.store(offsets + t, least, mask=t < columns)
        gains = (offsets + (columns + 15) // 16 * 16).to(tl.pointer_type(tl.float32))
        tl.store(gains + t, gain, mask=t < columns)


@triton.jit
def listed(places, known, values, which):
    """Put the values that count behind the ``known`` ones of a list; how many it has then."""
    tl.store(places + known + tl.cumsum(which.to(tl.int32), 0) - 1, values, mask=which)
    return known + tl.sum(which.to(tl.int32), 0)


@triton.jit
def rung_of(limits, total, count):
    """The rung of ``count`` values whose magnitudes sum to ``total``."""
    above = total.to(tl.float32) / tl.maximum(count, 1).to(tl.float32) > tl.load(limits + tl.arange(0, 64))
    return tl.minimum(tl.maximum(tl.sum(above.to(tl.int32), 0) - 1, 0), 20)


@triton.jit
def model_kernel(
    jobs, limits, costs, radii, scratch, offset_table, class_table, sample, wide: tl.constexpr, n: tl.constexpr,
    offset_bits: tl.constexpr,
):  # fmt: skip
    """Program p: whether part p has offsets, its live rows, shapes and tables; into the first 32 of its scratch.

    These are: tables of rows, columns, classes, the first rung plus 1, live rows, those with low bits (three), shapes
    (two halves). costs: ``[3, 32, 32]`` bits by shape, rung, magnitude.
    """
    job = jobs + 10 * tl.program_id(0)
    rows, columns = tl.load(job + 1).to(tl.int32), tl.load(job + 2).to(tl.int32)
    codes = codes_of(job, wide)
    centre = (tl.load(job + 3).to(tl.int32) - 1) // 2
    head = scratch + tl.load(job + 4)
    room, wide_room = (rows + 15) // 16 * 16, (columns + 15) // 16 * 16
    rungs = head + 32
    live, kept, moved = rungs + room, rungs + 2 * room, rungs + 3 * room
    offsets = rungs + 6 * room
    gains = (offsets + wide_room).to(tl.pointer_type(tl.float32))
    ladder = offsets + 2 * wide_room
    k = tl.arange(0, n)
    alive, with_low, with_more, with_most, change = 0, 0, 0, 0, 0
    for first in range(0, rows, n):
        r = first + k
        on = r < rows
        p = tl.load(rungs + r, mask=on, other=-1)
        before = tl.load(rungs + r - 1, mask=on & (r > 0), other=0)
        change += tl.sum(tl.where(on & (r > 0), tl.abs(p - before), 0), 0)
        low = tl.where(p > TOP, (p - 15) // 3, 0)
        has = on & (p >= 0)
        mine = alive + tl.cumsum(has.to(tl.int32), 0) - 1
        tl.store(live + mine, r, mask=has)
        tl.store(kept + mine, (p - 3 * low) | (low << 8), mask=has)
        alive += tl.sum(has.to(tl.int32), 0)
        with_low = listed(moved, with_low, mine, has & (low > 0))
        with_more = listed(moved + room, with_more, mine, has & (low > 5))
        with_most = listed(moved + 2 * room, with_most, mine, has & (low > 10))
    tl.debug_barrier()
    gain = tl.zeros([n], tl.float32)
    if (rows >= MIN_ROWS) & (columns >= 2) & (columns <= MOST_COLUMNS):
        for first in range(0, columns, n):
            gain += tl.load(gains + first + k, mask=first + k < columns, other=0.0)
    pays = tl.sum(gain, 0) > offset_bits * columns
    size = 0
    for first in range(0, columns, n):
        t = first + k
        offset = tl.load(offsets + t, mask=(t < columns) & (t < tl.where(pays, columns, 0)), other=0)
        tl.store(offsets + t, offset, mask=t < columns)
        size += tl.sum(tl.abs(offset), 0)
    tl.debug_barrier()
    seen = tl.zeros([1024], tl.int32)
    for i in range(0, (alive + sample - 1) // sample):
        row = tl.load(live + i * sample)
        for first in range(0, tl.minimum(columns, MOST_COLUMNS), n):
            t = first + k
            m, p, on = magnitudes(codes, rungs, row + 0 * t, t, t < columns, columns, centre)
            rung = tl.minimum(tl.maximum(p + tl.load(offsets + t, mask=t < columns, other=0), 0), 20)
            seen += tl.histogram(tl.where(on, rung * 32 + m, 1023), 1024)
    by = tl.arange(0, 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    weight = seen.to(tl.float32).reshape(32, 32)
    laplace = tl.sum(weight * tl.load(costs + by), 1)
    logistic = tl.sum(weight * tl.load(costs + 1024 + by), 1)
    gaussian = tl.sum(weight * tl.load(costs + 2048 + by), 1)
    shape = tl.where(laplace < logistic, 0, 1)
    shape = tl.where(gaussian < tl.minimum(laplace, logistic), 2, shape)
    rung = tl.arange(0, 32)
    shape = tl.where(tl.sum(weight, 1) > 0, shape, 1)
    shape = tl.where(rung < 21, shape, 0)
    tl.store(head + 8, tl.sum(tl.where(rung < 15, shape << (2 * tl.minimum(rung, 15)), 0), 0))
    tl.store(head + 9, tl.sum(tl.where(rung >= 15, shape << (2 * tl.maximum(rung - 15, 0)), 0), 0))
    # Entry i of the ladder: table and radius of the sum i - 15 of a rung and an offset.
    tl.store(ladder + 64 + rung, shape, mask=rung < 21)
    tl.debug_barrier()
    i = tl.arange(0, 64)
    at = tl.minimum(tl.maximum(i - 15, 0), 20)
    table = 21 * tl.load(ladder + 64 + at) + at
    tl.store(ladder + i, (table << 10) | tl.load(radii + table))
    row_table = tl.where(change == 0, 63, 21 + rung_of(limits, change, rows - 1))
    column_table = tl.where(size == 0, 63, offset_table)
    tl.store(head, row_table)
    tl.store(head + 1, column_table)
    tl.store(head + 2, class_table)
    tl.store(head + 3, tl.load(rungs) + 1)
    tl.store(head + 4, alive)
    tl.store(head + 5, with_low)
    tl.store(head + 6, with_more)
    tl.store(head + 7, with_most)
