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
def pair_signs(first, second, rows: tl.constexpr):
    """``[rows, half]`` of +1 and -1 from those of both sources, ``[half]``."""
    return tl.where(((tl.arange(0, rows) // 8) % 2 == 0)[:, None], first[None, :], second[None, :])


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
    """``[rows, 64]`` as two ``[rows, 32]`` that a store takes without moving data, from columns in ``spread_order``."""
    x = x.reshape(rows // 16, 2, 8, 2, 4, 4, 2).permute(1, 0, 2, 5, 4, 6, 3)
    return tl.split(x.reshape(rows, 32, 2))


@triton.jit
def store_rows(at, x, real, rows: tl.constexpr, half: tl.constexpr, ragged: tl.constexpr):
    """Rows of a product, ``at``: addresses of the rows, ``real``: whether they are there, both as in ``sixteens``."""
    if half == 64:
        left, right = spread(x, rows)
        into = at[:, None] + tl.arange(0, 32)[None, :]
        if ragged:
            tl.store(into, left, mask=real[:, None])
            tl.store(into + 32, right, mask=real[:, None])
        else:
            tl.store(into, left, cache_modifier=".cs")  # written once, read much later
            tl.store(into + 32, right, cache_modifier=".cs")
    else:
        x = x.reshape(rows // 16, 2, 8, half).permute(1, 0, 2, 3).reshape(rows, half)
        into = at[:, None] + tl.arange(0, half)[None, :]
        if ragged:
            tl.store(into, x, mask=real[:, None])
        else:
            tl.store(into, x)


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
def angles(job, token, cos, sin, half: tl.constexpr):
    """Cosine and sine ``[rows, half]`` of the tokens' positions."""
    position = tl.load(job + 7).to(tl.int32) + token
    at = position[:, None] * half + tl.arange(0, half)[None, :]
    return tl.load(cos + at), tl.load(sin + at)


@triton.jit
def turned_back(a, b, job, token, cos, sin, half: tl.constexpr, exact: tl.constexpr):
    """Halves of keys without their rotary embedding, in bf16 again."""
    turn, shift = angles(job, token, cos, sin, half)
    a, b = a.to(tl.float32), b.to(tl.float32)
    return to_bf16(a * turn + b * shift, exact), to_bf16(b * turn - a * shift, exact)


@triton.jit
def finished(x, y, sign_a, sign_b, job, token, cos, sin, half: tl.constexpr, rope: tl.constexpr, exact: tl.constexpr):
    """Sums to values: signs taken off, the rotary embedding put on, rounded."""
    if rope:
        turn, shift = angles(job, token, cos, sin, half)
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
def nibbles(packed, exact: tl.constexpr):
    """Low and high halves of bytes as bf16 plus 128: the code is the bf16's low bits."""
    if exact:
        return (packed & 15).to(tl.float32) + 128.0, (packed >> 4).to(tl.float32) + 128.0
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
            "=r,=r,=r,=r,r",
            [packed],
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
def prefetch(addresses):
    """Bring the lines at these addresses (i64) into the second-level cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
    )
