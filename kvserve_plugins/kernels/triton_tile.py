"""What the fused kernels share: where the rows of a tile lie, the rotation's signs, stored grids, codes as bf16.

A tile is ``rows`` times ``dim`` values, held as two halves of the channels. A job, eight i64, is one head of one layer
in one segment, or (``pair``) two of them whose codes share bytes: address of the first, of the second, where the codes
begin, where the parameters of the first and of the second begin, the flag of the segment, tokens, and the position of
the first one, by which block tables and tables of angles go. Jobs of the same layers and heads follow each other. A
piece, four i32, is a range of their tiles with the same signs: first tile, last, row of ``signs`` of the first source
and of the second; ``programs`` says which pieces a program takes.

``exact`` replaces tensor-core operands in bf16 by f32, which Triton's interpreter needs; the products are the same.
"""

import triton
import triton.language as tl

ROUND = tl.constexpr(12582912.0)
"""1.5 * 2^23: added to a small float, it leaves the nearest integer in the lowest bits of the sum."""
SMALLEST = tl.constexpr(1.1754943508222875e-38)
LARGEST = tl.constexpr(3.0e38)
"""Ranges up to this are coded; larger ones, and NaN, clear the segment's flag, and it goes another way."""
TOP = tl.constexpr(3.3895313892515355e38)
"""The largest bf16: grids that end above it need the reference's clamp."""


@triton.jit
def pair_rows(tile, rows: tl.constexpr):
    """Which source a row comes from, and its token. A thread holds rows g and g + 8: one of either source."""
    m = tl.arange(0, rows)
    return (m // 8) % 2, tile * (rows // 2) + m // 16 * 8 + m % 8


@triton.jit
def token_offset(job, token, table, block_stride, token_stride, page: tl.constexpr, dim: tl.constexpr):
    """Elements from a head's address to its tokens; ``page`` tokens a block, 0 for tokens that follow each other."""
    if page > 0:
        index = tl.load(job + 7).to(tl.int32) + token
        block = tl.load(table + index // page).to(tl.int64)
        return tl.multiple_of(block * block_stride + index % page * token_stride, 8)
    else:
        return token * dim


@triton.jit
def address(job, field: tl.constexpr):
    """A job's address as a pointer to bf16."""
    return tl.multiple_of(tl.load(job + field).to(tl.pointer_type(tl.bfloat16)), 16)


@triton.jit
def pair_bits(signs, piece, rows: tl.constexpr):
    """Signs of both sources of a piece as bits, to be given to :func:`signed`: a word for each thread of a quad."""
    q = tl.arange(0, 4)
    first, second = tl.load(signs + tl.load(piece + 2) * 4 + q), tl.load(signs + tl.load(piece + 3) * 4 + q)
    return tl.where(((tl.arange(0, rows) // 8) % 2 == 0)[:, None], first[None, :], second[None, :])[:, None, :, None]


@triton.jit
def signed(x, bits, first: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, exact: tl.constexpr):
    """Values times their signs, from two registers instead of one for every two values.

    Word q of ``bits`` is of columns 8 j + 2 q and 8 j + 2 q + 1: bits 15 - j and 31 - j, j from ``first`` on.
    """
    x = x.reshape(rows, columns // 8, 4, 2)
    j = (first + tl.arange(0, columns // 8))[None, :, None, None]
    if exact or x.dtype == tl.float32:
        word = (bits << (j + 16 * (1 - tl.arange(0, 2)[None, None, None, :]))) & -2147483648
        y = (x.to(tl.float32).to(tl.int32, bitcast=True) ^ word).to(tl.float32, bitcast=True).to(x.dtype)
    else:
        every: tl.constexpr = (rows, columns // 8, 4, 2)
        y = tl.inline_asm_elementwise(
            """{ .reg .b32 word;
            shl.b32 word, $2, $4;
            and.b32 word, word, 0x80008000;
            xor.b32 $0, $1, word; }""",
            "=r,r,r,r,r,r",
            [x, tl.broadcast_to(bits, every), tl.broadcast_to(j, every)],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    return y.reshape(rows, columns)


@triton.jit
def butterfly(a, b, matrix, exact: tl.constexpr):
    """Hadamard sums of rows given as halves: half the products, then one addition and one subtraction a value."""
    x, y = product(a, matrix, exact), product(b, matrix, exact)
    return x + y, x - y


@triton.jit
def coalesced(codes, rows: tl.constexpr, half: tl.constexpr):
    """Codes in channel order, from sums with a matrix whose columns ``store_order`` moved: no data moves here."""
    return codes.reshape(rows, half // 8, 4, 2).permute(0, 2, 1, 3).reshape(rows, half)


@triton.jit
def operand(codes, rows: tl.constexpr, half: tl.constexpr):
    """Codes as a product takes them without moving data; the matrix' rows are in ``load_order``."""
    return codes.reshape(rows, 4, half // 16, 2, 2).permute(0, 2, 3, 1, 4).reshape(rows, half)


@triton.jit
def sixteens(rows: tl.constexpr):
    """Which row of a product is row r of what :func:`spread` gives: lower eights of all sixteens, then upper ones."""
    r = tl.arange(0, rows)
    return r % (rows // 2) // 8 * 16 + r // (rows // 2) * 8 + r % 8


@triton.jit
def spread(x, rows: tl.constexpr):
    """``[rows, 32]`` that a store takes without moving data, from columns in ``spread_order``, rows as ``sixteens``."""
    return x.reshape(rows // 16, 2, 8, 4, 4, 2).permute(1, 0, 2, 4, 3, 5).reshape(rows, 32)


@triton.jit
def store_rows(at, x, real, rows: tl.constexpr, half: tl.constexpr, ragged: tl.constexpr):
    """Rows of a product, ``at``: addresses of the rows, ``real``: whether they are there, both as in ``sixteens``."""
    if half == 64:
        left, right = tl.split(x.reshape(rows, 2, 32).permute(0, 2, 1))
        store_columns(at, left, real, rows, ragged)
        store_columns(at + 32, right, real, rows, ragged)
    else:
        store_columns(at, x, real, rows, ragged)


@triton.jit
def store_columns(at, x, real, rows: tl.constexpr, ragged: tl.constexpr):
    """As above, 32 columns."""
    into = at[:, None] + tl.arange(0, 32)[None, :]
    if ragged:
        tl.store(into, spread(x, rows), mask=real[:, None])
    else:
        tl.store(into, spread(x, rows), cache_modifier=".cs")  # written once, read much later


@triton.jit
def to_bf16(x, exact: tl.constexpr):
    """The nearest bf16, ties to even; the interpreter's own conversion cuts off."""
    if exact:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def product(a, b, exact: tl.constexpr):
    """``a @ b`` in f32 of bf16 matrices."""
    if exact:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b)


@triton.jit
def flip(x, signs, exact: tl.constexpr):
    """bf16 times +1 or -1."""
    if exact:
        return x.to(tl.float32) * signs.to(tl.float32)
    else:
        return x * signs


@triton.jit
def angles(job, token, cos, sin, half: tl.constexpr, first: tl.constexpr, columns: tl.constexpr):
    """Cosine and sine ``[rows, columns]`` of the tokens' positions, from channel ``first`` on."""
    position = tl.load(job + 7).to(tl.int32) + token
    at = position[:, None] * half + first + tl.arange(0, columns)[None, :]
    return tl.load(cos + at), tl.load(sin + at)


@triton.jit
def turned_back(a, b, job, token, cos, sin, half: tl.constexpr, exact: tl.constexpr):
    """Halves of keys without their rotary embedding, in bf16 again."""
    turn, shift = angles(job, token, cos, sin, half, 0, half)
    a, b = a.to(tl.float32), b.to(tl.float32)
    return to_bf16(a * turn + b * shift, exact), to_bf16(b * turn - a * shift, exact)


@triton.jit
def finished(x, y, sign_a, sign_b, job, token, cos, sin, half: tl.constexpr, rope: tl.constexpr, exact: tl.constexpr):
    """Sums to values: signs taken off, the rotary embedding put on, rounded."""
    if rope:
        turn, shift = angles(job, token, cos, sin, half, 0, half)
        x, y = x * sign_a.to(tl.float32), y * sign_b.to(tl.float32)
        return to_bf16(x * turn - y * shift, exact), to_bf16(y * turn + x * shift, exact)
    else:
        x, y = to_bf16(x, exact), to_bf16(y, exact)
        return flip(x, sign_a, exact).to(tl.bfloat16), flip(y, sign_b, exact).to(tl.bfloat16)


@triton.jit
def grid_of(lo, hi, outward, exact: tl.constexpr):
    """Minimum and scale as the reference stores them, in f32: rounded outwards to bf16."""
    bits = lo.to(tl.int32, bitcast=True)
    lo = ((bits + ((bits >> 31) & 0xFFFF)) & -65536).to(tl.float32, bitcast=True)
    quarter = hi * outward - lo * outward
    return lo, tl.maximum(to_bf16(quarter * 4.0, exact).to(tl.float32), SMALLEST)


@triton.jit
def steps(y, lo, scale):
    """The nearest grid point in the low bits of i32; rows and columns broadcast."""
    return ((y - lo) * (1.0 / scale) + ROUND).to(tl.int32, bitcast=True)


@triton.jit
def nibbles(words, rows: tl.constexpr, columns: tl.constexpr, exact: tl.constexpr):
    """Low and high halves of the bytes of words ``[rows, columns / 4]`` as bf16 plus 128: the code is its low bits."""
    twice = tl.join(words, words)  # not a broadcast, which Triton would move behind the conversion
    each = tl.join(twice, twice).reshape(rows, columns)
    if exact:
        byte = (each >> (tl.arange(0, columns) % 4 * 8)[None, :]) & 255
        return (byte & 15).to(tl.float32) + 128.0, (byte >> 4).to(tl.float32) + 128.0
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 low, high;
            and.b32 low, $4, 0x0F0F0F0F;
            shr.u32 high, $4, 4;
            and.b32 high, high, 0x0F0F0F0F;
            prmt.b32 $0, low, 0x43434343, 0x4140;
            prmt.b32 $1, low, 0x43434343, 0x4342;
            prmt.b32 $2, high, 0x43434343, 0x4140;
            prmt.b32 $3, high, 0x43434343, 0x4342; }""",
            "=r,=r,=r,=r,r,r,r,r",
            [each],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )


@triton.jit
def widened(codes, exact: tl.constexpr):
    """Codes below 128 as bf16 plus 128."""
    if exact:
        return codes.to(tl.float32) + 128.0
    else:
        return tl.inline_asm_elementwise(
            """{ prmt.b32 $0, $2, 0x43434343, 0x4140;
            prmt.b32 $1, $2, 0x43434343, 0x4342; }""",
            "=r,=r,r",
            [codes],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )


@triton.jit
def clear(flags, bad, exact: tl.constexpr):
    """Zero the flags (addresses of u8) of bad rows. ``tl.store`` would first move the values to other threads."""
    if exact:
        tl.store(flags, tl.zeros_like(bad).to(tl.uint8), mask=bad)
    else:
        tl.inline_asm_elementwise(
            """{ .reg .pred bad; .reg .b16 none;
            mov.b16 none, 0;
            setp.ne.s32 bad, $2, 0;
            @bad st.global.u8 [$1], none;
            mov.u32 $0, 0; }""",
            "=r,l,r",
            [flags.to(tl.int64), bad.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
