"""The sections of a part of codec ``rans`` that hold its values, on a GPU; for :mod:`~.triton_rans`."""

import triton
import triton.language as tl

from kvserve_plugins.kernels.triton_rans_steps import ahead, beyond, escapes, grid, read

ZERO = tl.constexpr(63)
ESCAPE = tl.constexpr(31)
CENTRE = tl.constexpr(15)
PLAIN = tl.constexpr(63)


@triton.jit
def along(
    x, at, bad, out, live, rungs, offsets, ladder, places, words, count, tables, states, cap, columns, alive, centre,
    alphabet, stride, chunks, n: tl.constexpr, each: tl.constexpr, spilled: tl.constexpr, narrow: tl.constexpr,
):  # fmt: skip
    """Values where every step lies within a row."""
    lane = grid(n, each)
    kind: tl.constexpr = out.dtype.element_ty
    left = alive * columns
    found = 0
    small = (centre < CENTRE) | (alphabet - centre <= CENTRE)
    row, info = tl.load(live), tl.load(rungs)
    column, line = 0, 0
    base = tl.load(ladder + CENTRE + (info & 255) + tl.load(offsets + lane))
    line += (columns == n).to(tl.int32)
    next_row, next_info = (
        tl.load(live + line, mask=line < alive, other=0),
        tl.load(rungs + line, mask=line < alive, other=0),
    )
    seen, touched = tl.zeros([8], tl.int32), tl.zeros([8], tl.int32)
    for i in range(0, left // n):  # what the next step needs is asked for in this one, and its row in the one before
        seen ^= touched
        touched = ahead(words, at, count)
        next_column = tl.where(column + n == columns, 0, column + n)
        next_base = tl.load(
            ladder + CENTRE + (next_info & 255) + tl.load(offsets + tl.multiple_of(next_column, 16) + lane)
        )
        line += (next_column + n == columns).to(tl.int32)
        later_row = tl.load(live + line, mask=line < alive, other=0)
        later_info = tl.load(rungs + line, mask=line < alive, other=0)
        x, at, symbol, before, more = read(
            x, at, base, words, count, tables, states, i % chunks, n, each, spilled, narrow
        )
        into = out + tl.multiple_of(row * columns + column, 16) + lane
        if (info >= 256) | small:
            low = info >> 8
            known = tl.load(into).to(tl.int32)
            value = ((symbol - CENTRE) << low) + centre
            value = tl.where(low > 0, value + known - ((1 << low) >> 1), value)
            bad |= (symbol != ESCAPE) & ((value < 0) | (value >= alphabet))
            tl.store(into, value.to(kind), mask=symbol != ESCAPE)
        else:
            tl.store(into, (symbol + (centre - CENTRE)).to(kind))
        if more > 0:
            tl.store(places + found + before, i * n + lane, mask=(symbol == ESCAPE) & (found + before < cap))
        found += more
        row, info, base, column = next_row, next_info, next_base, next_column
        next_row, next_info = later_row, later_info
    tl.store(ladder + 64 + tl.arange(0, 8), seen)  # so that the loads stay
    return x, at, bad, found


@triton.jit
def across(
    x, at, bad, out, live, rungs, offsets, ladder, places, words, count, tables, states, cap, columns, alive, centre,
    alphabet, stride, chunks, n: tl.constexpr, each: tl.constexpr, spilled: tl.constexpr, narrow: tl.constexpr,
):  # fmt: skip
    """Values where a step may lie anywhere."""
    lane = grid(n, each)
    kind: tl.constexpr = out.dtype.element_ty
    left = alive * columns
    found = 0
    line, column = lane // columns, lane % columns
    lines, rest = stride // columns, stride % columns
    on = (lane < stride) & (lane < left)
    info = tl.load(rungs + line, mask=on, other=0)
    base = tl.load(ladder + CENTRE + (info & 255) + tl.load(offsets + column, mask=on, other=0))
    row = tl.load(live + line, mask=on, other=0)
    seen, touched = tl.zeros([8], tl.int32), tl.zeros([8], tl.int32)
    for i in range(0, tl.cdiv(left, stride)):
        seen ^= touched
        touched = ahead(words, at, count)
        j = i * stride + lane
        on = (lane < stride) & (j < left)
        into, low = out + row * columns + column, info >> 8
        here = tl.where(on, base, ZERO << 8)
        column += rest
        line += lines + (column >= columns).to(tl.int32)
        column = tl.where(column >= columns, column - columns, column)
        later = (lane < stride) & (j + stride < left)
        info = tl.load(rungs + line, mask=later, other=0)
        row = tl.load(live + line, mask=later, other=0)
        base = tl.load(ladder + CENTRE + (info & 255) + tl.load(offsets + column, mask=later, other=0))
        x, at, symbol, before, more = read(
            x, at, here, words, count, tables, states, i % chunks, n, each, spilled, narrow
        )
        known = tl.load(into, mask=on & (low > 0), other=0).to(tl.int32)
        value = ((symbol - CENTRE) << low) + known - ((1 << low) >> 1) + centre
        bad |= on & (symbol != ESCAPE) & ((value < 0) | (value >= alphabet))
        tl.store(into, value.to(kind), mask=on & (symbol != ESCAPE))
        if more > 0:
            tl.store(places + found + before, j, mask=(symbol == ESCAPE) & (found + before < cap))
        found += more
    tl.store(ladder + 64 + tl.arange(0, 8), seen)  # so that the loads stay
    return x, at, bad, found


@triton.jit
def values(
    x, at, bad, out, live, rungs, dead, moved, offsets, ladder, places, radii, words, count, tables, states, cap, rows,
    columns, alive, still, with_low, with_more, with_most, class_table, centre, alphabet, stride, chunks,
    n: tl.constexpr, each: tl.constexpr, spilled: tl.constexpr, narrow: tl.constexpr,
):  # fmt: skip
    """Low bits, values, and what escaped from them. Low bits wait where their code will be."""
    lane = grid(n, each)
    kind: tl.constexpr = out.dtype.element_ty
    for i in range(0, still):
        row = tl.load(dead + i) * columns
        for c in range(0, tl.cdiv(columns, n)):
            at_column = c * n + lane
            tl.store(out + row + at_column, (centre + tl.zeros_like(lane)).to(kind), mask=at_column < columns)
    for done in range(0, 15, 5):
        left = tl.where(done == 0, with_low, tl.where(done == 5, with_more, with_most)) * columns
        these = moved + done // 5 * ((rows + 15) // 16 * 16)
        for i in range(0, tl.cdiv(left, stride)):
            j = i * stride + lane
            on = (lane < stride) & (j < left)
            mine = tl.load(these + j // columns, mask=on, other=0)
            bits = tl.minimum((tl.load(rungs + mine, mask=on, other=0) >> 8) - done, 5)
            base = tl.where(on, PLAIN + bits, ZERO) << 8
            x, at, symbol, _, _ = read(x, at, base, words, count, tables, states, i % chunks, n, each, spilled, narrow)
            into = out + tl.load(live + mine, mask=on, other=0) * columns + j % columns
            known = tl.load(into, mask=on & (lane < done * n), other=0).to(tl.int32)
            tl.store(into, (known | (symbol << done)).to(kind), mask=on)
        tl.debug_barrier()
    if (columns % stride == 0) & (stride == n):
        x, at, bad, found = along(
            x, at, bad, out, live, rungs, offsets, ladder, places, words, count, tables, states, cap, columns, alive,
            centre, alphabet, stride, chunks, n, each, spilled, narrow,
        )  # fmt: skip
    else:
        x, at, bad, found = across(
            x, at, bad, out, live, rungs, offsets, ladder, places, words, count, tables, states, cap, columns, alive,
            centre, alphabet, stride, chunks, n, each, spilled, narrow,
        )  # fmt: skip
    bad |= lane < (found > cap).to(tl.int32) * n
    found = tl.where(found > cap, 0, found)
    tl.debug_barrier()
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
    for i in range(0, tl.cdiv(found, n)):
        j = i * n + lane
        on = j < found
        where = tl.load(places + j, mask=on, other=0)
        line, column = where // columns, where % columns
        info = tl.load(rungs + line, mask=on, other=0)
        low = info >> 8
        base = tl.load(ladder + CENTRE + (info & 255) + tl.load(offsets + column, mask=on, other=0))
        into = out + tl.load(live + line, mask=on, other=0) * columns + column
        known = tl.load(into, mask=on & (low > 0), other=0).to(tl.int32)
        value = (beyond(places, cap, j, on, tl.load(radii + (base >> 8))) << low) + known - ((1 << low) >> 1) + centre
        bad |= on & ((value < 0) | (value >= alphabet))
        tl.store(into, value.to(kind), mask=on)
    return x, at, bad
