"""Hadamard rotation, min-max grid and codes of one byte, laid out head by head for an entropy coder; and the inverse.

What ``hadamard`` and ``uniform`` (axis ``token_head`` or ``channel``, bf16 parameters, up to 128 levels) do, also
inside ``mixhq``: levels go by job, fields 1 (levels - 1) and 4 (the factor from a range to a quarter of a scale, as
f32 bits). With ``channel`` a tile holds all tokens of a segment, so the statistics cost no second pass; decoding puts
the scales into the matrix, which bf16 holds exactly: ``H (q s) = (H diag(s)) q``.
"""

import triton
import triton.language as tl

from kvserve_plugins.kernels.triton_tile import (
    LARGEST,
    TOP,
    address,
    butterfly,
    coalesced,
    finished,
    flip,
    grid_of,
    operand,
    product,
    sixteens,
    steps,
    store_rows,
    token_offset,
    turned_back,
    widened,
)


@triton.jit
def encode_kernel(
    jobs, pieces, programs, signs, matrix, codes, grids, plane, ok, table, block_stride, token_stride, cos, sin, norm,
    tiles: tl.constexpr, dim: tl.constexpr, rows: tl.constexpr, channel: tl.constexpr, page: tl.constexpr,
    rope: tl.constexpr, ragged: tl.constexpr, stages: tl.constexpr, exact: tl.constexpr,
):  # fmt: skip
    """A persistent program works through its pieces. ``matrix``: of half a head, columns in ``store_order``."""
    half: tl.constexpr = dim // 2
    c = tl.arange(0, half)
    h = tl.load(matrix + c[:, None] * half + c[None, :])
    for i in range(tl.load(programs + tl.program_id(0)), tl.load(programs + tl.program_id(0) + 1)):
        piece = pieces + i * 4
        sign_a = tl.load(signs + tl.load(piece + 2) * dim + c)[None, :]
        sign_b = tl.load(signs + tl.load(piece + 2) * dim + half + c)[None, :]
        for t in tl.range(tl.load(piece), tl.load(piece + 1), num_stages=stages):
            job = jobs + t // tiles * 8
            token = t % tiles * rows + tl.arange(0, rows)
            source = address(job, 0) + token_offset(job, token, table, block_stride, token_stride, page, dim)
            at = source[:, None] + c[None, :]
            real = token < tl.load(job + 6)
            if ragged:
                a = tl.load(at, mask=real[:, None], other=0.0)
                b = tl.load(at + half, mask=real[:, None], other=0.0)
            else:
                a, b = tl.load(at), tl.load(at + half)
            if rope:
                a, b = turned_back(a, b, job, token, cos, sin, half, exact)
            x, y = butterfly(flip(a, sign_a, exact), flip(b, sign_b, exact), h, exact)
            outward = tl.load(job + 4).to(tl.int32).to(tl.float32, bitcast=True)
            flag = ok + tl.load(job + 5)
            if channel:
                where = grids + tl.load(job + 3) + half // 4 * (c % 8 // 2) + 2 * (c // 8) + c % 2  # store_order
                left, bad_a = _by_channel(x, real, norm, outward, where, plane, ragged, exact)
                right, bad_b = _by_channel(y, real, norm, outward, where + half, plane, ragged, exact)
                tl.store(flag, 0, mask=bad_a | bad_b)
            else:
                low, high = tl.min(tl.minimum(x, y), 1) * norm, tl.max(tl.maximum(x, y), 1) * norm
                lo, scale = grid_of(low, high, outward, exact)
                left = steps(x * norm, lo[:, None], scale[:, None]).to(tl.uint8)
                right = steps(y * norm, lo[:, None], scale[:, None]).to(tl.uint8)
                where = (grids + tl.load(job + 3) + token)[:, None] + plane * tl.arange(0, 2)[None, :]
                tl.store(where, tl.join(lo.to(tl.bfloat16), scale.to(tl.bfloat16)), mask=real[:, None])
                bad = real & ((high - low < LARGEST) == 0)
                tl.store(flag + tl.zeros_like(token), tl.zeros_like(token).to(tl.uint8), mask=bad)
            into = tl.multiple_of(codes + tl.load(job + 2), 16) + (token[:, None] * dim + c[None, :])
            if ragged:
                tl.store(into, coalesced(left, rows, half), mask=real[:, None])
                tl.store(into + half, coalesced(right, rows, half), mask=real[:, None])
            else:
                tl.store(into, coalesced(left, rows, half))
                tl.store(into + half, coalesced(right, rows, half))


@triton.jit
def _by_channel(y, real, norm, outward, where, plane, ragged: tl.constexpr, exact: tl.constexpr):
    """Codes of one half of the channels, and whether a value is not finite. The grids are stored."""
    if ragged:
        low = tl.min(tl.where(real[:, None], y, float("inf")), 0) * norm
        high = tl.max(tl.where(real[:, None], y, float("-inf")), 0) * norm
    else:
        low, high = tl.min(y, 0) * norm, tl.max(y, 0) * norm
    # A row with NaN or Inf is so throughout, and minima pass over NaN: zero times the sum of a row tells.
    tainted = tl.sum(tl.sum(y * 0.0, 1), 0) == 0.0
    bad = (tainted & (tl.max(high - low, 0) < LARGEST)) == 0
    lo, scale = grid_of(low, high, outward, exact)
    grid = tl.join(lo.to(tl.bfloat16), scale.to(tl.bfloat16))
    tl.store(where[:, None] + plane * tl.arange(0, 2)[None, :], grid)
    return steps(y * norm, lo[None, :], scale[None, :]).to(tl.uint8), bad


@triton.jit
def decode_kernel(
    jobs, pieces, programs, signs, matrix, codes, grids, plane, ok, table, block_stride, token_stride, cos, sin, norm,
    tiles: tl.constexpr, dim: tl.constexpr, rows: tl.constexpr, channel: tl.constexpr, page: tl.constexpr,
    rope: tl.constexpr, ragged: tl.constexpr, stages: tl.constexpr, exact: tl.constexpr,
):  # fmt: skip
    """As above. ``matrix``: its rows in ``load_order`` for heads and tokens, plain for channels."""
    half: tl.constexpr = dim // 2
    c = tl.arange(0, half)
    h = tl.load(matrix + c[:, None] * half + c[None, :])
    for i in range(tl.load(programs + tl.program_id(0)), tl.load(programs + tl.program_id(0) + 1)):
        piece = pieces + i * 4
        sign_a = tl.load(signs + tl.load(piece + 2) * dim + c)[None, :]
        sign_b = tl.load(signs + tl.load(piece + 2) * dim + half + c)[None, :]
        for t in tl.range(tl.load(piece), tl.load(piece + 1), num_stages=stages):
            job = jobs + t // tiles * 8
            token = t % tiles * rows + tl.arange(0, rows)
            real = token < tl.load(job + 6)
            source = tl.multiple_of(codes + tl.load(job + 2), 16) + (token[:, None] * dim + c[None, :])
            if ragged:
                left = tl.load(source, mask=real[:, None], other=0)
                right = tl.load(source + half, mask=real[:, None], other=0)
            else:
                left, right = tl.load(source), tl.load(source + half)
            flag = ok + tl.load(job + 5)
            if channel:
                where = grids + tl.load(job + 3) + c
                a, shift_a, bad_a = _scaled(left, h, where, plane, norm, exact)
                b, shift_b, bad_b = _scaled(right, h, where + half, plane, norm, exact)
                x, y = (a + b) * norm + (shift_a + shift_b)[None, :], (a - b) * norm + (shift_a - shift_b)[None, :]
                tl.store(flag, 0, mask=bad_a | bad_b)
            else:
                where = grids + tl.load(job + 3) + token
                lo = tl.load(where, mask=real, other=0.0).to(tl.float32)
                scale = tl.load(where + plane, mask=real, other=0.0).to(tl.float32)
                a, b = widened(operand(left, rows, half), exact), widened(operand(right, rows, half), exact)
                x, y = butterfly(a, b, h, exact)
                constant = (lo - 128.0 * scale) * (norm * dim)
                x = x * (scale * norm)[:, None] + tl.where((c == 0)[None, :], constant[:, None], 0.0)
                y = y * (scale * norm)[:, None]
                bad = real & (((tl.abs(lo) + 256.0 * scale) * dim <= TOP) == 0)  # the sums before the norm, too
                tl.store(flag + tl.zeros_like(token), tl.zeros_like(token).to(tl.uint8), mask=bad)
            x, y = finished(x, y, sign_a, sign_b, job, token, cos, sin, half, rope, exact)
            there = t % tiles * rows + sixteens(rows)
            into = address(job, 0) + token_offset(job, there, table, block_stride, token_stride, page, dim)
            store_rows(into, x, there < tl.load(job + 6), rows, half, ragged)
            store_rows(into + half, y, there < tl.load(job + 6), rows, half, ragged)


@triton.jit
def _scaled(codes, h, where, plane, norm, exact: tl.constexpr):
    """Half the channels' share of the sums, what their minima add to it, and whether the sums may be too high."""
    lo, scale = tl.load(where).to(tl.float32), tl.load(where + plane).to(tl.float32)
    matrix = (h.to(tl.float32) * scale[:, None]).to(tl.bfloat16)
    sums = product(widened(codes, exact) - 128.0, matrix, exact)
    shift = tl.sum(h.to(tl.float32) * lo[:, None], 0) * norm
    return sums, shift, tl.max((tl.abs(lo) + 256.0 * scale) * (2.0 * h.shape[0]), 0) > TOP
