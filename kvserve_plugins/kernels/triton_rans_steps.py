"""One step of the lanes of codec ``rans`` on a GPU, and the escapes of a section; for :mod:`~.triton_rans`.

A vector of lanes is ``[each, lanes / each]``: a thread has ``each`` neighbours, so that most of a scan stays in it.
Words are read within the blob only. Symbols beyond a section's end are under table 63, which changes nothing.
"""

import triton
import triton.language as tl

ZERO = tl.constexpr(63)
ESCAPE = tl.constexpr(31)
CENTRE = tl.constexpr(15)
PLAIN = tl.constexpr(63)
LOW = tl.constexpr(65536)
BUCKETS = tl.constexpr(69 * 256)
AHEAD = tl.constexpr(256)


@triton.jit
def grid(lanes: tl.constexpr, each: tl.constexpr):
    """Numbers of the lanes ``[each, lanes / each]``: a thread has neighbours, so that most of a scan stays in it."""
    return tl.arange(0, each)[:, None] + tl.arange(0, lanes // each)[None, :] * each


@triton.jit
def ranks(counts):
    """Sums of the counts of all lanes before each lane, and of all."""
    own = tl.sum(counts, 0)
    ahead = tl.cumsum(own, 0) - own
    return tl.cumsum(counts, 0) - counts + ahead[None, :], tl.sum(own, 0)


@triton.jit
def listed(places, known, values, which):
    """Put the values that count behind the ``known`` ones of a list; how many it has then."""
    before, total = ranks(which.to(tl.int32))
    tl.store(places + known + before, values, mask=which)
    return known + total


@triton.jit
def pop(x, at, base, words, count, tables, narrow: tl.constexpr):
    """One step of all lanes: states, place in the words, symbols, escapes before each lane, escapes in all.

    base: 256 times the table of each lane. narrow: as in :class:`~.rans_device.DeviceTables`.
    """
    slot = (x & 4095).to(tl.int32)
    if narrow:
        entry = tl.load(tables + base + (slot >> 4))
        passed = ((entry + (slot & 15) * 0x2108420) >> 9) & 0x108421
        which = (entry & 31) + ((passed * 0x108421 >> 20) & 31)
        entry = tl.load(tables + BUCKETS + (base >> 3) + which).to(tl.uint32, bitcast=True)
        inside = slot.to(tl.uint32) - ((entry >> 5) & 4095)
    else:
        entry = tl.load(tables + base * 16 + slot).to(tl.uint32, bitcast=True)
        inside = (entry >> 5) & 4095
    symbol = (entry & 31).to(tl.int32)
    high = x >> 12
    x = high * (entry >> 17) + high + inside
    empty = x < LOW
    flags = empty.to(tl.int32) + ((symbol == ESCAPE).to(tl.int32) << 16)
    before, total = ranks(flags)
    place = at + (before & 65535)
    word = tl.load(words + place, mask=empty & (place < count), other=0).to(tl.uint32) & 65535
    x = tl.where(empty, (x << 16) | word, x)
    return x, at + (total & 65535), symbol, before >> 16, total >> 16


@triton.jit
def ahead(words, at, count):
    """Words that the steps after the next ones take, a few of them, so that all are in the cache by then."""
    place = at + AHEAD + 16 * tl.arange(0, 8)
    return tl.load(words + place, mask=place < count, other=0).to(tl.int32)


@triton.jit
def read(
    x,
    at,
    base,
    words,
    count,
    tables,
    states,
    chunk,
    lanes: tl.constexpr,
    each: tl.constexpr,
    spilled: tl.constexpr,
    narrow: tl.constexpr,
):
    """As :func:`pop`. spilled: states are in memory, as there are more (or fewer) of them than the vector holds."""
    if spilled:
        mine = states + chunk * lanes + grid(lanes, each)
        x = tl.load(mine).to(tl.uint32, bitcast=True)
    x, at, symbol, before, escapes = pop(x, at, base, words, count, tables, narrow)
    if spilled:
        tl.store(mine, x.to(tl.int32, bitcast=True))
        tl.debug_barrier()
    return x, at, symbol, before, escapes


@triton.jit
def escapes(
    x, at, bad, found, table, places, words, count, tables, states, cap, stride, chunks,
    lanes: tl.constexpr, each: tl.constexpr, spilled: tl.constexpr, narrow: tl.constexpr,
):  # fmt: skip
    """Classes and mantissas of ``found`` escapes; list 1 becomes the classes, list 3 the mantissas."""
    lane = grid(lanes, each)
    classes, some, mantissas = places + cap, places + 2 * cap, places + 3 * cap
    for i in range(0, tl.cdiv(found, stride)):
        j = i * stride + lane
        on = (lane < stride) & (j < found)
        base = tl.where(on, table, ZERO) << 8
        x, at, symbol, _, _ = read(x, at, base, words, count, tables, states, i % chunks, lanes, each, spilled, narrow)
        bad |= on & ((symbol == ESCAPE) | (symbol == CENTRE))
        tl.store(classes + j, symbol - CENTRE, mask=on)
        tl.store(mantissas + j, tl.zeros_like(lane), mask=on)
    tl.debug_barrier()
    for done in range(0, 15, 5):
        left = 0
        for i in range(0, tl.cdiv(found, lanes)):
            j = i * lanes + lane
            more = tl.abs(tl.load(classes + j, mask=j < found, other=0)) - 1 > done
            left = listed(some, left, j, more)
        tl.debug_barrier()
        for i in range(0, tl.cdiv(left, stride)):
            j = i * stride + lane
            on = (lane < stride) & (j < left)
            which = tl.load(some + j, mask=on, other=0)
            bits = tl.minimum(tl.abs(tl.load(classes + which, mask=on, other=0)) - 1 - done, 5)
            base = tl.where(on, PLAIN + bits, ZERO) << 8
            x, at, symbol, _, _ = read(
                x, at, base, words, count, tables, states, i % chunks, lanes, each, spilled, narrow
            )
            known = tl.load(mantissas + which, mask=on, other=0)
            tl.store(mantissas + which, known | (symbol << done), mask=on)
        tl.debug_barrier()
    return x, at, bad


@triton.jit
def beyond(places, cap, j, on, radius):
    """The value of escape ``j`` from a table of that radius."""
    c = tl.load(places + cap + j, mask=on, other=1)
    exponent = tl.maximum(tl.abs(c) - 1, 0)
    size = radius + (1 << exponent) + tl.load(places + 3 * cap + j, mask=on, other=0)
    return tl.where(c < 0, -size, size)
