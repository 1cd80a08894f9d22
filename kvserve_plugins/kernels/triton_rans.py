"""Decoding of codec ``rans`` on a GPU: one program a part, all lanes of a part as one vector, sections in a row.

The format is in ``docs/rans-format.md``. A job, ten i64, is one part: address of its blob, bytes of it, rows, columns,
address of its codes, alphabet, where its scratch begins, escapes that fit there, its flag, states that fit there.
Scratch, i32: seven lists of ``rows``, rounded up to 16 (differences of rungs, live rows, their rungs, rows without
values, three lists of those with low bits), offsets of ``columns``, 64 tables by rung, four lists of escapes, states.

Nothing is trusted: what a blob says is checked before it is used as a place, and a part that is not in order clears
its flag.
"""

import triton
import triton.language as tl

from kvserve_plugins.kernels.triton_rans_steps import beyond, escapes, grid, listed, ranks, read
from kvserve_plugins.kernels.triton_rans_values import values

ZERO = tl.constexpr(63)
ESCAPE = tl.constexpr(31)
CENTRE = tl.constexpr(15)
LOW = tl.constexpr(65536)
TOP = tl.constexpr(17)
MAX_ROW = tl.constexpr(53)
MAX_STEPS = tl.constexpr(8192)


@triton.jit
def decode_kernel(
    jobs,
    tables,
    radii,
    scratch,
    ok,
    others,
    lane_bits: tl.constexpr,
    lanes: tl.constexpr,
    each: tl.constexpr,
    narrow: tl.constexpr,
    wide: tl.constexpr,
):
    """Program p: part p, if it has ``2^lane_bits`` lanes; for -1, if its number of lanes is not in ``others``."""
    job = jobs + 10 * tl.program_id(0)
    blob = tl.load(job).to(tl.pointer_type(tl.uint8))
    size = tl.load(job + 1)
    k = tl.load(blob, mask=size >= 12, other=255).to(tl.int32)
    fast = (k <= 30) & (((others >> tl.minimum(k, 30)) & 1) != 0)
    mine = (k == lane_bits) | ((lane_bits < 0) & (not fast))
    if mine:
        good = decode(job, blob, size, k, tables, radii, scratch, lanes, each, lane_bits < 0, narrow, wide)
        tl.store(ok + tl.load(job + 8), good.to(tl.uint8))


@triton.jit
def decode(
    job, blob, size, k, tables, radii, scratch,
    lanes: tl.constexpr, each: tl.constexpr, spilled: tl.constexpr, narrow: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """Decode a part; 1 if all of it was in order."""
    row_table = tl.load(blob + 1, mask=size >= 12, other=255).to(tl.int32)
    column_table = tl.load(blob + 2, mask=size >= 12, other=255).to(tl.int32)
    class_table = tl.load(blob + 3, mask=size >= 12, other=255).to(tl.int32)
    first = tl.load(blob + 4, mask=size >= 12, other=255).to(tl.int32) - 1
    i = tl.arange(0, 8)
    packed = tl.load(blob + 5 + i, mask=i < tl.where(size >= 12, 7, 0), other=0).to(tl.int64)
    shapes = tl.sum(packed << (8 * i), 0)
    every = 0x2AAAAAAAAAA  # the upper bit of 21 shapes
    good = (k <= 16) & (row_table <= ZERO) & (column_table <= ZERO) & (class_table <= ZERO) & (first <= MAX_ROW)
    good = good & ((shapes >> 42) == 0) & ((shapes & (shapes << 1) & every) == 0)
    good = good & (size % 2 == 0) & (size >= 12 + (4 << tl.minimum(k, 16)).to(tl.int64))
    result = 0
    if good:
        result = sections(
            job, blob, size, k, row_table, column_table, class_table, first, shapes, tables, radii, scratch, lanes,
            each, spilled, narrow, wide,
        )  # fmt: skip
    return result


@triton.jit
def sections(
    job, blob, size, k, row_table, column_table, class_table, first, shapes, tables, radii, scratch,
    lanes: tl.constexpr, each: tl.constexpr, spilled: tl.constexpr, narrow: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """All sections of a part whose header is in order."""
    rows, columns = tl.load(job + 2).to(tl.int32), tl.load(job + 3).to(tl.int32)
    alphabet = tl.load(job + 5).to(tl.int32)
    scratch += tl.multiple_of(tl.load(job + 6), 16)
    cap = tl.load(job + 7).to(tl.int32)
    if wide:
        out = tl.multiple_of(tl.load(job + 4).to(tl.pointer_type(tl.int16)), 16)
    else:
        out = tl.multiple_of(tl.load(job + 4).to(tl.pointer_type(tl.uint8)), 16)
    centre = (alphabet - 1) // 2
    n: tl.constexpr = lanes
    count = ((size - 12) // 2).to(tl.int32) - (2 << k)
    words = (blob + 12 + (4 << k)).to(tl.pointer_type(tl.int16))
    room = (rows + 15) // 16 * 16  # so that the compiler sees what can be loaded four at a time
    differences, live, rungs, dead = scratch, scratch + room, scratch + 2 * room, scratch + 3 * room
    moved = scratch + 4 * room
    offsets = tl.multiple_of((scratch + 7 * room).to(tl.pointer_type(tl.int16)), 16)
    ladder = scratch + 7 * room + (columns + 15) // 16 * 16
    places = ladder + 96
    states = places + 4 * cap
    lane = grid(n, each)
    stride = tl.minimum(1 << k, n)
    chunks = (1 << k) // stride
    bad = lane < 0
    x = (tl.zeros_like(lane) + LOW).to(tl.uint32)
    source = (blob + 12).to(tl.pointer_type(tl.int32))
    for i in range(0, chunks):
        x = tl.load(source + i * n + lane, mask=lane < stride, other=LOW).to(tl.uint32, bitcast=True)
        bad |= x < LOW
        if spilled:
            tl.store(states + i * n + lane, x.to(tl.int32, bitcast=True))
    at = 0
    most = MAX_STEPS << k

    # Rows: differences of rungs, then rungs, and which rows have values and low bits.
    found = 0
    coded = tl.where(row_table != ZERO, rows - 1, 0)
    long = coded > most
    coded = tl.where(long, 0, coded)
    for i in range(0, tl.cdiv(coded, stride)):
        j = i * stride + lane
        on = (lane < stride) & (j < coded)
        base = tl.where(on, row_table, ZERO) << 8
        x, at, symbol, before, more = read(
            x, at, base, words, count, tables, states, i % chunks, n, each, spilled, narrow
        )
        tl.store(differences + 1 + j, symbol - CENTRE, mask=on)
        tl.store(places + found + before, j, mask=(symbol == ESCAPE) & (found + before < cap))
        found += more
    long = long | (found > cap)
    found = tl.where(long, 0, found)
    x, at, bad = escapes(
        x,
        at,
        bad,
        found,
        class_table,
        places,
        words,
        count,
        tables,
        states,
        cap,
        stride,
        chunks,
        n,
        each,
        spilled,
        narrow,
    )
    radius = tl.load(radii + row_table)
    for i in range(0, tl.cdiv(found, n)):
        j = i * n + lane
        value = beyond(places, cap, j, j < found, radius)
        tl.store(differences + 1 + tl.load(places + j, mask=j < found, other=0), value, mask=j < found)
    tl.debug_barrier()
    rung, alive, still = first, 0, 0
    with_low, with_more, with_most = 0, 0, 0
    for i in range(0, tl.cdiv(rows, n)):
        r = i * n + lane
        on = r < rows
        change = tl.load(differences + r, mask=on & (r > 0) & (r <= coded), other=0)
        p, total = ranks(change)
        p += rung + change
        rung += total
        bad |= on & ((p < -1) | (p > MAX_ROW))
        p = tl.minimum(p, MAX_ROW)
        has = on & (p >= 0)
        low = tl.where(p > TOP, (p - 15) // 3, 0)
        if not wide:
            bad |= has & (low > 8)  # no code of a byte needs them
        mine, total = ranks(has.to(tl.int32))
        mine += alive
        alive += total
        tl.store(live + mine, r, mask=has)
        tl.store(rungs + mine, (p - 3 * low) | (low << 8), mask=has)
        still = listed(dead, still, r, on & (p < 0))
        with_low = listed(moved, with_low, mine, has & (low > 0))
        with_more = listed(moved + room, with_more, mine, has & (low > 5))
        with_most = listed(moved + 2 * room, with_most, mine, has & (low > 10))

    # Columns: offsets, and the table of each sum of a rung and an offset.
    coded = tl.where(column_table != ZERO, columns, 0)
    long = long | (coded > most) | (alive.to(tl.int64) * columns > most)
    coded = tl.where(long, 0, coded)
    for i in range(0, tl.cdiv(coded, stride)):
        j = i * stride + lane
        on = (lane < stride) & (j < coded)
        base = tl.where(on, column_table, ZERO) << 8
        x, at, symbol, _, _ = read(x, at, base, words, count, tables, states, i % chunks, n, each, spilled, narrow)
        bad |= symbol == ESCAPE
        tl.store(offsets + j, (symbol - CENTRE).to(tl.int16), mask=on)
    if coded == 0:
        for i in range(0, tl.cdiv(columns, n)):
            tl.store(offsets + i * n + lane, tl.zeros_like(lane).to(tl.int16), mask=i * n + lane < columns)
    step = tl.arange(0, 64)
    at_rung = tl.minimum(tl.maximum(step - CENTRE, 0), 20)
    shape = ((shapes >> (2 * at_rung)) & 3).to(tl.int32)
    tl.store(ladder + step, (21 * shape + at_rung) << 8)
    tl.debug_barrier()
    bad |= lane < long.to(tl.int32) * n
    if tl.max(tl.max(bad.to(tl.int32), 0), 0) == 0:
        x, at, bad = values(
            x, at, bad, out, live, rungs, dead, moved, offsets, ladder, places, radii, words, count, tables, states,
            cap, rows, columns, alive, still, with_low, with_more, with_most, class_table, centre, alphabet, stride,
            chunks, n, each, spilled, narrow,
        )  # fmt: skip
    if spilled:
        for i in range(0, chunks):
            bad |= tl.load(states + i * n + lane) != LOW
    else:
        bad |= x != LOW
    return ((tl.max(tl.max(bad.to(tl.int32), 0), 0) == 0) & (at == count)).to(tl.int32)
