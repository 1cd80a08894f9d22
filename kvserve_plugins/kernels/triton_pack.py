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
    angles,
    butterfly,
    clear,
    coalesced,
    grid_of,
    nibbles,
    operand,
    pair_bits,
    pair_rows,
    signed,
    steps,
    store_columns,
    to_bf16,
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
        bits = pair_bits(signs, piece, rows)
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
            a, b = signed(a, bits, 0, rows, half, exact), signed(b, bits, 8, rows, half, exact)
            x, y = butterfly(a, b, h, exact)
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
            bad = (high - low < LARGEST) == 0
            clear(ok + tl.load(job + 5) + tl.zeros_like(token), bad & real if ragged else bad, exact)


@triton.jit
def _bytes(code, rows: tl.constexpr, half: tl.constexpr):
    """Codes of both sources as bytes, ``[rows / 2, half]``."""
    low, high = tl.split(code.reshape(rows // 16, 2, 8, half).permute(0, 2, 3, 1))
    return ((high << 4) + low).to(tl.uint8).reshape(rows // 2, half)


@triton.jit
def decode_kernel(
    jobs, pieces, programs, signs, matrix, codes, grids, plane, ok, table, block_stride, token_stride, cos, sin, norm,
    tiles: tl.constexpr, dim: tl.constexpr, rows: tl.constexpr, page: tl.constexpr, rope: tl.constexpr,
    ragged: tl.constexpr, exact: tl.constexpr,
):  # fmt: skip
    """As above. ``matrix``: its rows in ``load_order``. ``ok`` is cleared where the reference's clamp is needed.

    A tile's bytes are on their way while the one before is worked on, in registers: nothing waits for another thread.
    """
    half: tl.constexpr = dim // 2
    near = matrix + tl.arange(0, half)[:, None] * half + tl.arange(0, 32)[None, :]
    h = tl.load(near)
    if half == 64:
        g = tl.load(near + 32)
    if not exact:
        tl.debug_barrier()  # the matrix is in shared memory: without it Triton asks in every tile
    for i in range(tl.load(programs + tl.program_id(0)), tl.load(programs + tl.program_id(0) + 1)):
        piece = pieces + i * 4
        bits = pair_bits(signs, piece, rows)
        first, stop = tl.load(piece), tl.load(piece + 1)
        left, right, low, step = _fetch(first, jobs, codes, grids, plane, tiles, dim, rows, ragged)
        for t in tl.range(first, stop, num_stages=1):
            job = jobs + t // tiles * 8
            a, b, lo, scale = left, right, low.to(tl.float32), step.to(tl.float32)
            later = tl.minimum(t + 1, stop - 1)
            left, right, low, step = _fetch(later, jobs, codes, grids, plane, tiles, dim, rows, ragged)
            into, there = _target(t, jobs, table, block_stride, token_stride, tiles, dim, rows, page)
            a, b = _operands(a, rows, half, exact), _operands(b, rows, half, exact)
            _, token = pair_rows(t % tiles, rows)
            real = there < tl.load(job + 6)
            constant = (lo - 128.0 * scale) * (norm * dim)
            factor = scale * norm
            _columns(
                a, b, h, bits, factor, constant, into, real, job, token, cos, sin, 0, rows, half, rope, ragged, exact
            )
            if half == 64:
                _columns(
                    a, b, g, bits, factor, 0, into, real, job, token, cos, sin, 32, rows, half, rope, ragged, exact
                )
            bad = ((tl.abs(lo) + 256.0 * scale) * dim <= TOP) == 0  # the sums before the norm, too
            bad = bad & (token < tl.load(job + 6)) if ragged else bad
            clear(ok + tl.load(job + 5) + tl.zeros_like(token), bad, exact)


@triton.jit
def _columns(
    a, b, h, bits, factor, constant, into, real, job, token, cos, sin, first: tl.constexpr, rows: tl.constexpr,
    half: tl.constexpr, rope: tl.constexpr, ragged: tl.constexpr, exact: tl.constexpr,
):  # fmt: skip
    """32 channels of either half from ``first`` on; ``h``: their columns. Fewer at a time need fewer registers."""
    x, y = butterfly(a, b, h, exact)
    x, y = x * factor[:, None], y * factor[:, None]
    if first == 0:
        x += tl.where((tl.arange(0, 32) == 0)[None, :], constant[:, None], 0.0)
    j: tl.constexpr = first // 8
    if rope:
        turn, shift = angles(job, token, cos, sin, half, first, 32)
        x, y = signed(x, bits, j, rows, 32, exact), signed(y, bits, 8 + j, rows, 32, exact)
        x, y = to_bf16(x * turn - y * shift, exact), to_bf16(y * turn + x * shift, exact)
    else:
        x, y = to_bf16(x, exact), to_bf16(y, exact)
        x, y = signed(x, bits, j, rows, 32, exact), signed(y, bits, 8 + j, rows, 32, exact)
    store_columns(into + first, x, real, rows, ragged)
    store_columns(into + half + first, y, real, rows, ragged)


@triton.jit
def _fetch(
    t, jobs, codes, grids, plane, tiles: tl.constexpr, dim: tl.constexpr, rows: tl.constexpr, ragged: tl.constexpr
):
    """Bytes of both halves of a tile's channels as words, and the minimum and scale of its rows."""
    packed: tl.constexpr = rows // 2
    job = jobs + t // tiles * 8
    row = t % tiles * packed + tl.arange(0, packed)
    start = tl.multiple_of((codes + tl.load(job + 2)).to(tl.pointer_type(tl.int32)), 16)
    source = start + (row[:, None] * (dim // 4) + tl.arange(0, dim // 8)[None, :])
    upper, token = pair_rows(t % tiles, rows)
    where = grids + tl.where(upper == 0, tl.load(job + 3), tl.load(job + 4)) + token
    if ragged:
        inside, real = (row < tl.load(job + 6))[:, None], token < tl.load(job + 6)
        left, right = tl.load(source, mask=inside, other=0), tl.load(source + dim // 8, mask=inside, other=0)
        return left, right, tl.load(where, mask=real, other=0.0), tl.load(where + plane, mask=real, other=0.0)
    else:
        return tl.load(source), tl.load(source + dim // 8), tl.load(where), tl.load(where + plane)


@triton.jit
def _target(
    t, jobs, table, block_stride, token_stride, tiles: tl.constexpr, dim: tl.constexpr, rows: tl.constexpr,
    page: tl.constexpr,
):  # fmt: skip
    """Addresses of a tile's rows, as in ``sixteens``, and their tokens."""
    job, r = jobs + t // tiles * 8, tl.arange(0, rows)
    there = t % tiles * (rows // 2) + r % (rows // 2)
    start = tl.where(r < rows // 2, address(job, 0), address(job, 1))
    return start + token_offset(job, there, table, block_stride, token_stride, page, dim), there


@triton.jit
def _operands(words, rows: tl.constexpr, half: tl.constexpr, exact: tl.constexpr):
    """The inverse of :func:`_bytes`, as bf16 plus 128."""
    low, high = nibbles(words, rows // 2, half, exact)
    low, high = operand(low, rows // 2, half), operand(high, rows // 2, half)
    return tl.join(low, high).reshape(rows // 16, 8, half, 2).permute(0, 3, 1, 2).reshape(rows, half)
