"""Hadamard rotation, min-max grid of each head and token, 16 levels, two codes a byte: one pass, and its inverse.

What the stages ``hadamard``, ``uniform`` (axis ``token_head``, 16 levels, bf16 parameters) and ``bitpack`` do one after
the other. Bytes are those of ``bitpack``: code i of a segment in the low half of byte i, code i + n / 2 in the high
half, so a tile takes rows of two sources. Decoding multiplies the codes themselves, small integers that bf16 holds
exactly, and applies each row's scale to the sums: ``H (q s + lo) = s H q + lo H 1``; ``H 1`` is 0 past channel 0.
See :mod:`kvserve_plugins.kernels.triton_tile` for jobs and groups, and docs/performance.md for what it reaches.
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
    nibbles,
    operand,
    pair_rows,
    pair_signs,
    prefetch,
    steps,
    store_rows,
    token_offset,
    turned_back,
)


@triton.jit
def encode_kernel(
    jobs, pieces, programs, signs, matrix, codes, grids, plane, ok, table, block_stride, token_stride, cos, sin, norm,
    outward, tiles: tl.constexpr, dim: tl.constexpr, rows: tl.constexpr, page: tl.constexpr, rope: tl.constexpr,
    ragged: tl.constexpr, stages: tl.constexpr, exact: tl.constexpr,
):  # fmt: skip
    """A persistent program works through its pieces. ``matrix``: of half a head, columns in ``store_order``."""
    half: tl.constexpr = dim // 2
    packed: tl.constexpr = rows // 2
    c = tl.arange(0, half)
    h = tl.load(matrix + c[:, None] * half + c[None, :])
    for i in range(tl.load(programs + tl.program_id(0)), tl.load(programs + tl.program_id(0) + 1)):
        piece = pieces + i * 4
        first, second = signs + tl.load(piece + 2) * dim + c, signs + tl.load(piece + 3) * dim + c
        sign_a = pair_signs(tl.load(first), tl.load(second), rows)
        sign_b = pair_signs(tl.load(first + half), tl.load(second + half), rows)
        for t in tl.range(tl.load(piece), tl.load(piece + 1), num_stages=stages):
            job = jobs + t // tiles * 8
            upper, token = pair_rows(t % tiles, rows)
            start = tl.where(upper == 0, address(job, 0), address(job, 1))
            source = start + token_offset(job, token, table, block_stride, token_stride, page, dim)
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
            low, high = tl.min(tl.minimum(x, y), 1) * norm, tl.max(tl.maximum(x, y), 1) * norm
            lo, scale = grid_of(low, high, outward, exact)
            row = t % tiles * packed + tl.arange(0, packed)
            into = tl.multiple_of(codes + tl.load(job + 2), 16) + (row[:, None] * dim + c[None, :])
            left = coalesced(_bytes(steps(x * norm, lo[:, None], scale[:, None]), rows, half), packed, half)
            right = coalesced(_bytes(steps(y * norm, lo[:, None], scale[:, None]), rows, half), packed, half)
            where = grids + tl.where(upper == 0, tl.load(job + 3), tl.load(job + 4)) + token
            both = where[:, None] + plane * tl.arange(0, 2)[None, :]
            grid = tl.join(lo.to(tl.bfloat16), scale.to(tl.bfloat16))
            if ragged:
                inside = (row < tl.load(job + 6))[:, None]
                tl.store(into, left, mask=inside)
                tl.store(into + half, right, mask=inside)
                tl.store(both, grid, mask=real[:, None])
            else:
                tl.store(into, left)
                tl.store(into + half, right)
                tl.store(both, grid)
            flag = ok + tl.load(job + 5) + tl.zeros_like(token)
            tl.store(flag, tl.zeros_like(token).to(tl.uint8), mask=real & ((high - low < LARGEST) == 0))


@triton.jit
def _bytes(code, rows: tl.constexpr, half: tl.constexpr):
    """Codes of both sources as bytes, ``[rows / 2, half]``."""
    low, high = tl.split(code.reshape(rows // 16, 2, 8, half).permute(0, 2, 3, 1))
    return ((high << 4) + low).to(tl.uint8).reshape(rows // 2, half)


@triton.jit
def decode_kernel(
    jobs, pieces, programs, signs, matrix, codes, grids, plane, ok, table, block_stride, token_stride, cos, sin, norm,
    tiles: tl.constexpr, dim: tl.constexpr, rows: tl.constexpr, page: tl.constexpr, rope: tl.constexpr,
    ragged: tl.constexpr, ahead: tl.constexpr, exact: tl.constexpr,
):  # fmt: skip
    """As above. ``matrix``: its rows in ``load_order``. ``ok`` is cleared where the reference's clamp is needed."""
    half: tl.constexpr = dim // 2
    packed: tl.constexpr = rows // 2
    c = tl.arange(0, half)
    h = tl.load(matrix + c[:, None] * half + c[None, :])
    for i in range(tl.load(programs + tl.program_id(0)), tl.load(programs + tl.program_id(0) + 1)):
        piece = pieces + i * 4
        first, second = signs + tl.load(piece + 2) * dim + c, signs + tl.load(piece + 3) * dim + c
        sign_a = pair_signs(tl.load(first), tl.load(second), rows)
        sign_b = pair_signs(tl.load(first + half), tl.load(second + half), rows)
        stop = tl.load(piece + 1)
        for t in range(tl.load(piece), stop):
            _ahead(tl.minimum(t + ahead, stop - 1), jobs, codes, tiles, dim, rows, exact)
            job = jobs + t // tiles * 8
            left, right, lo, scale = _fetch(t, jobs, codes, grids, plane, tiles, dim, rows, ragged)
            _, token = pair_rows(t % tiles, rows)
            real = token < tl.load(job + 6)
            a, b = _operands(left, rows, half, exact), _operands(right, rows, half, exact)
            x, y = butterfly(a, b, h, exact)
            lo, scale = lo.to(tl.float32), scale.to(tl.float32)
            constant = (lo - 128.0 * scale) * (norm * dim)
            x = x * (scale * norm)[:, None] + tl.where((c == 0)[None, :], constant[:, None], 0.0)
            y = y * (scale * norm)[:, None]
            x, y = finished(x, y, sign_a, sign_b, job, token, cos, sin, half, rope, exact)
            r = tl.arange(0, rows)
            there = t % tiles * packed + r % packed
            into = tl.where(r < packed, address(job, 0), address(job, 1))
            into += token_offset(job, there, table, block_stride, token_stride, page, dim)
            store_rows(into, x, there < tl.load(job + 6), rows, half, ragged)
            store_rows(into + half, y, there < tl.load(job + 6), rows, half, ragged)
            flag = ok + tl.load(job + 5) + tl.zeros_like(token)
            bad = real & ((tl.maximum(lo + 15.0 * scale, -lo) <= TOP) == 0)
            tl.store(flag, tl.zeros_like(token).to(tl.uint8), mask=bad)


@triton.jit
def _ahead(t, jobs, codes, tiles: tl.constexpr, dim: tl.constexpr, rows: tl.constexpr, exact: tl.constexpr):
    """A later tile's bytes on their way into the cache, so that loading them is short."""
    if not exact:
        lines: tl.constexpr = rows // 2 * dim // 128
        start = codes + tl.load(jobs + t // tiles * 8 + 2) + t % tiles * (rows // 2 * dim)
        prefetch((start + tl.arange(0, lines) * 128).to(tl.int64))


@triton.jit
def _fetch(
    t, jobs, codes, grids, plane, tiles: tl.constexpr, dim: tl.constexpr, rows: tl.constexpr, ragged: tl.constexpr
):
    """Bytes of both halves of a tile's channels, and the minimum and scale of its rows."""
    packed: tl.constexpr = rows // 2
    job = jobs + t // tiles * 8
    row = t % tiles * packed + tl.arange(0, packed)
    c = tl.arange(0, dim // 2)
    source = tl.multiple_of(codes + tl.load(job + 2), 16) + (row[:, None] * dim + c[None, :])
    upper, token = pair_rows(t % tiles, rows)
    where = grids + tl.where(upper == 0, tl.load(job + 3), tl.load(job + 4)) + token
    if ragged:
        inside, real = (row < tl.load(job + 6))[:, None], token < tl.load(job + 6)
        left, right = tl.load(source, mask=inside, other=0), tl.load(source + dim // 2, mask=inside, other=0)
        return left, right, tl.load(where, mask=real, other=0.0), tl.load(where + plane, mask=real, other=0.0)
    else:
        return tl.load(source), tl.load(source + dim // 2), tl.load(where), tl.load(where + plane)


@triton.jit
def _operands(byte, rows: tl.constexpr, half: tl.constexpr, exact: tl.constexpr):
    """The inverse of :func:`_bytes`, as bf16 plus 128."""
    low, high = nibbles(operand(byte, rows // 2, half), exact)
    return tl.join(low, high).reshape(rows // 16, 8, half, 2).permute(0, 3, 1, 2).reshape(rows, half)
