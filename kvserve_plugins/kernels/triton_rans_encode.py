"""Encoding of codec ``rans`` on a GPU: the sections of a part backwards, all lanes as one vector.

Jobs and scratch are those of :mod:`~.triton_rans_fit`, which made the choices. Words go from the end of the scratch
towards its beginning, as a decoder takes first what was given away last, and are moved behind the states at the end.
"""

import triton
import triton.language as tl

from kvserve_plugins.kernels.triton_rans_fit import codes_of
from kvserve_plugins.kernels.triton_rans_steps import grid, listed, ranks

ZERO = tl.constexpr(63)
ESCAPE = tl.constexpr(31)
CENTRE = tl.constexpr(15)
PLAIN = tl.constexpr(63)
LOW = tl.constexpr(65536)


@triton.jit
def push(x, place, key, words, pairs, inverses):
    """One step of all lanes, ``key`` being 32 times the table, plus the symbol: states, where the words begin."""
    pair = tl.load(pairs + key).to(tl.uint32, bitcast=True)
    inverse = tl.load(inverses + key)
    count = pair >> 12
    full = (x >> 20) >= count
    before, total = ranks(full.to(tl.int32))
    place -= total
    tl.store(words + place + before, x.to(tl.int16), mask=full & (place + before >= 0))
    x = tl.where(full, x >> 16, x)
    quotient = (x.to(tl.float32) * inverse).to(tl.int32)
    rest = (x - quotient.to(tl.uint32) * count).to(tl.int32)
    size = count.to(tl.int32)
    less, more = rest < 0, rest >= size
    quotient = tl.where(less, quotient - 1, tl.where(more, quotient + 1, quotient))
    rest = tl.where(less, rest + size, tl.where(more, rest - size, rest))
    return (quotient << 12).to(tl.uint32) + (pair & 4095) + rest.to(tl.uint32), place


@triton.jit
def escaped(value, radius, on, lists, cap, found):
    """Symbols of values, and the lists of classes and mantissas of those beyond the radius; how many there are."""
    over = tl.abs(value) - radius
    out = on & (over > 0)
    before, total = ranks(out.to(tl.int32))
    if total > 0:
        exponent = (tl.maximum(over, 1).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        fits = out & (found + before < cap)
        tl.store(lists + found + before, tl.where(value < 0, -exponent - 1, exponent + 1), mask=fits)
        tl.store(lists + cap + found + before, over - (1 << exponent), mask=fits)
    return found + total


@triton.jit
def push_escapes(x, place, found, table, lists, cap, words, pairs, inverses, n: tl.constexpr, each: tl.constexpr):
    """Mantissas, then classes: backwards."""
    lane = grid(n, each)
    for turn in range(0, 3):
        done = 10 - 5 * turn
        left = 0
        for i in range(0, tl.cdiv(found, n)):
            j = i * n + lane
            more = tl.abs(tl.load(lists + j, mask=j < found, other=0)) - 1 > done
            left = listed(lists + 2 * cap, left, j, more)
        tl.debug_barrier()
        steps = tl.cdiv(left, n)
        for i in range(0, steps):
            j = (steps - 1 - i) * n + lane
            on = j < left
            which = tl.load(lists + 2 * cap + j, mask=on, other=0)
            bits = tl.minimum(tl.abs(tl.load(lists + which, mask=on, other=2)) - 1 - done, 5)
            symbol = (tl.load(lists + cap + which, mask=on, other=0) >> done) & ((1 << bits) - 1)
            key = tl.where(on, (PLAIN + bits) * 32 + symbol, ZERO * 32 + CENTRE)
            x, place = push(x, place, key, words, pairs, inverses)
        tl.debug_barrier()
    steps = tl.cdiv(found, n)
    for i in range(0, steps):
        j = (steps - 1 - i) * n + lane
        on = j < found
        key = tl.where(on, table * 32 + tl.load(lists + j, mask=on, other=0) + CENTRE, ZERO * 32 + CENTRE)
        x, place = push(x, place, key, words, pairs, inverses)
    return x, place


@triton.jit
def line_of(step, lane, columns, regular: tl.constexpr, n: tl.constexpr):
    """Row and column of the values of a step; ``regular``: a step lies within a row."""
    if regular:
        line = step * n // columns
        return line + 0 * lane, step * n - line * columns + lane
    else:
        j = step * n + lane
        line = j // columns
        return line, j - line * columns


@triton.jit
def value_of(codes, live, kept, offsets, ladder, line, column, on, columns, centre):
    """Values as they are coded, and the tables and radii under which."""
    info = tl.load(kept + line, mask=on, other=0)
    row = tl.load(live + line, mask=on, other=0)
    entry = tl.load(ladder + CENTRE + (info & 255) + tl.load(offsets + column, mask=on, other=0))
    low = info >> 8
    q = tl.load(codes + row * columns + column, mask=on, other=0).to(tl.int32) - centre
    return tl.where(on, (q + ((1 << low) >> 1)) >> low, 0), entry >> 10, entry & 1023


@triton.jit
def push_values(
    x, place, codes, live, kept, offsets, ladder, lists, cap, class_table, left, columns, centre, words, pairs,
    inverses, regular: tl.constexpr, n: tl.constexpr, each: tl.constexpr,
):  # fmt: skip
    """The values of all live rows, what escapes from them first; how many these are."""
    lane = grid(n, each)
    steps = tl.cdiv(left, n)
    found = 0
    for i in range(0, steps):
        line, column = line_of(i, lane, columns, regular, n)
        on = i * n + lane < left
        value, table, radius = value_of(codes, live, kept, offsets, ladder, line, column, on, columns, centre)
        found = escaped(value, radius, on, lists, cap, found)
    tl.debug_barrier()
    x, place = push_escapes(x, place, tl.minimum(found, cap), class_table, lists, cap, words, pairs, inverses, n, each)
    line, column = line_of(tl.maximum(steps - 1, 0), lane, columns, regular, n)
    on = (steps - 1) * n + lane < left
    value, table, radius = value_of(codes, live, kept, offsets, ladder, line, column, on, columns, centre)
    for i in range(0, steps):  # the codes of the next step are asked for in this one
        symbol = tl.where(tl.abs(value) > radius, ESCAPE, value + CENTRE)
        key = tl.where(on, table * 32 + symbol, ZERO * 32 + CENTRE)
        step = tl.maximum(steps - 2 - i, 0)
        line, column = line_of(step, lane, columns, regular, n)
        on = step * n + lane < left
        value, table, radius = value_of(codes, live, kept, offsets, ladder, line, column, on, columns, centre)
        x, place = push(x, place, key, words, pairs, inverses)
    return x, place, found


@triton.jit
def encode_kernel(
    jobs, pairs, inverses, radii, scratch, totals, lane_bits: tl.constexpr, each: tl.constexpr, wide: tl.constexpr
):
    """Program p: the blob of part p. Its size is the limit of the job where it would have been that, or more."""
    job = jobs + 10 * tl.program_id(0)
    n: tl.constexpr = 1 << lane_bits
    lane = grid(n, each)
    rows, columns = tl.load(job + 1).to(tl.int32), tl.load(job + 2).to(tl.int32)
    codes = codes_of(job, wide)
    centre = (tl.load(job + 3).to(tl.int32) - 1) // 2
    head = scratch + tl.multiple_of(tl.load(job + 4), 16)
    cap = tl.load(job + 5).to(tl.int32)
    blob = tl.multiple_of(tl.load(job + 6).to(tl.pointer_type(tl.uint8)), 16)
    limit = tl.load(job + 7)
    place = tl.load(job + 9).to(tl.int32)
    whole = place
    room, wide_room = (rows + 15) // 16 * 16, (columns + 15) // 16 * 16
    rungs = head + 32
    live, kept, moved = rungs + room, rungs + 2 * room, rungs + 3 * room
    offsets = rungs + 6 * room
    ladder = offsets + 2 * wide_room
    lists = ladder + 128
    words = (lists + 3 * cap).to(tl.pointer_type(tl.int16))
    row_table, column_table, class_table = tl.load(head), tl.load(head + 1), tl.load(head + 2)
    alive = tl.load(head + 4)
    x = (tl.zeros_like(lane) + LOW).to(tl.uint32)
    left = alive * columns
    if columns % n == 0:
        x, place, found = push_values(
            x, place, codes, live, kept, offsets, ladder, lists, cap, class_table, left, columns, centre, words, pairs,
            inverses, True, n, each,
        )  # fmt: skip
    else:
        x, place, found = push_values(
            x, place, codes, live, kept, offsets, ladder, lists, cap, class_table, left, columns, centre, words, pairs,
            inverses, False, n, each,
        )  # fmt: skip
    lost = found > cap
    for turn in range(0, 3):  # low bits
        done = 10 - 5 * turn
        these = moved + (2 - turn) * room
        left = tl.load(head + 7 - turn) * columns
        steps = tl.cdiv(left, n)
        for i in range(0, steps):
            j = (steps - 1 - i) * n + lane
            on = j < left
            line = tl.load(these + j // columns, mask=on, other=0)
            low = tl.load(kept + line, mask=on, other=0) >> 8
            row = tl.load(live + line, mask=on, other=0)
            q = tl.load(codes + row * columns + j % columns, mask=on, other=0).to(tl.int32) - centre
            bits = tl.minimum(low - done, 5)
            symbol = (((q + ((1 << low) >> 1)) & ((1 << low) - 1)) >> done) & ((1 << bits) - 1)
            key = tl.where(on, (PLAIN + bits) * 32 + symbol, ZERO * 32 + CENTRE)
            x, place = push(x, place, key, words, pairs, inverses)
    left = tl.where(column_table != ZERO, columns, 0)
    steps = tl.cdiv(left, n)
    for i in range(0, steps):
        j = (steps - 1 - i) * n + lane
        on = j < left
        symbol = tl.load(offsets + j, mask=on, other=0) + CENTRE
        x, place = push(x, place, tl.where(on, column_table * 32 + symbol, ZERO * 32 + CENTRE), words, pairs, inverses)
    left = tl.where(row_table != ZERO, rows - 1, 0)
    radius = tl.load(radii + row_table)
    steps = tl.cdiv(left, n)
    tl.debug_barrier()
    found = 0
    for i in range(0, steps):
        j = i * n + lane
        on = j < left
        change = tl.load(rungs + 1 + j, mask=on, other=0) - tl.load(rungs + j, mask=on, other=0)
        found = escaped(change, radius, on, lists, cap, found)
    tl.debug_barrier()
    x, place = push_escapes(x, place, tl.minimum(found, cap), class_table, lists, cap, words, pairs, inverses, n, each)
    lost = lost | (found > cap)
    for i in range(0, steps):
        j = (steps - 1 - i) * n + lane
        on = j < left
        change = tl.load(rungs + 1 + j, mask=on, other=0) - tl.load(rungs + j, mask=on, other=0)
        symbol = tl.where(tl.abs(change) > radius, ESCAPE, change + CENTRE)
        x, place = push(x, place, tl.where(on, row_table * 32 + symbol, ZERO * 32 + CENTRE), words, pairs, inverses)
    tl.debug_barrier()
    size = (12 + 4 * n + 2 * (whole - place)).to(tl.int64)
    if lost | (place < 0) | (size >= limit):
        tl.store(totals + tl.load(job + 8), limit)
    else:
        shapes = tl.load(head + 8).to(tl.int64) | (tl.load(head + 9).to(tl.int64) << 30)
        i = tl.arange(0, 16)
        byte = ((shapes >> (8 * tl.minimum(tl.maximum(i - 5, 0), 7))) & 255).to(tl.int32)
        byte = tl.where(i == 0, lane_bits, tl.where(i == 4, tl.load(head + 3), byte))
        byte = tl.where((i > 0) & (i < 4), tl.load(head + tl.minimum(tl.maximum(i - 1, 0), 2)), byte)
        tl.store(blob + i, byte.to(tl.uint8), mask=i < 12)
        tl.store((blob + 12).to(tl.pointer_type(tl.int32)) + lane, x.to(tl.int32, bitcast=True))
        into = (blob + 12 + 4 * n).to(tl.pointer_type(tl.int16))
        for i in range(0, tl.cdiv(whole - place, 4 * n)):
            j = i * 4 * n + tl.arange(0, 4 * n)
            on = j < whole - place
            tl.store(into + j, tl.load(words + place + j, mask=on, other=0), mask=on)
        tl.store(totals + tl.load(job + 8), size)
