"""A block of layers to calibrated components and back, as products of large matrices with everything else fused in.

Encoding: :func:`gather_kernel` lays the values of a token side by side (positions turned back, energy counted), then
:func:`encode_kernel` multiplies by the basis, in units of the quantizer's step, and stores codes component by
component. Decoding: :func:`turn_kernel` makes rows of whole numbers in bf16, exactly, and :func:`decode_kernel`
multiplies, adds the mean, applies positions and scatters. A job, four i64, is what one basis covers of one segment:
address, first element of its codes, tokens, position of the first. ``between``: heads from a layer to the next.
"""

import triton
import triton.language as tl

from kvserve_plugins.kernels.triton_tile import ROUND, product, to_bf16

MIDDLE = tl.constexpr(127)


@triton.jit
def gather_kernel(
    jobs, cos, sin, mean, scale, matrix, energy, layers, between,
    turned: tl.constexpr, rest: tl.constexpr, rows: tl.constexpr, cell: tl.constexpr,
    exact: tl.constexpr,
):  # fmt: skip
    """Program (job, block of tokens): ``[T, layers * dim]`` in bf16, zeros past the last token of a cell.

    The first ``turned`` channels carry a rotary embedding, pairs half of them apart; ``rest`` follow as they are.
    """
    dim: tl.constexpr = turned + rest
    job = jobs + tl.program_id(0) * 4
    t = tl.program_id(1) * rows + tl.arange(0, rows)
    real = (t < tl.load(job + 2))[:, None]
    layer_stride = tl.load(job + 2) * between * dim
    start = tl.multiple_of(tl.load(job).to(tl.pointer_type(tl.bfloat16)), 16)
    into = matrix + (tl.program_id(0) * cell + t)[:, None].to(tl.int64) * (layers * dim)
    total = tl.zeros([rows], tl.float32)
    if turned > 0:
        half: tl.constexpr = turned // 2
        c = tl.arange(0, half)
        angle = (tl.load(job + 3) + t)[:, None] * half + c[None, :]
        turn = tl.load(cos + angle, mask=real, other=0.0).to(tl.float32)
        shift = tl.load(sin + angle, mask=real, other=0.0).to(tl.float32)
        for layer in range(layers):
            at = tl.multiple_of(start + layer * layer_stride, 8) + t[:, None] * dim + c[None, :]
            a = tl.load(at, mask=real, other=0.0).to(tl.float32)
            b = tl.load(at + half, mask=real, other=0.0).to(tl.float32)
            x, y = a * turn + b * shift, b * turn - a * shift
            total += _centred(x, into, mean, scale, layer * dim + c, real, exact)
            total += _centred(y, into, mean, scale, layer * dim + half + c, real, exact)
    if rest > 0:
        r = turned + tl.arange(0, rest)
        for layer in range(layers):
            at = tl.multiple_of(start + layer * layer_stride, 8) + t[:, None] * dim + r[None, :]
            z = tl.load(at, mask=real, other=0.0).to(tl.float32)
            total += _centred(z, into, mean, scale, layer * dim + r, real, exact)
    tl.atomic_add(energy + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _centred(x, into, mean, scale, at, real, exact: tl.constexpr):
    """Store values without their mean, which would cost bits of bf16; the energy of each row in the metric."""
    x = tl.where(real, x - tl.load(mean + at)[None, :], 0.0)
    tl.store(into + at[None, :], to_bf16(x, exact))
    x *= tl.load(scale + at)[None, :]
    return tl.sum(x * x, 1)


@triton.jit
def encode_kernel(
    values, basis, jobs, codes, energy, ok, depth, components, wide,
    cell: tl.constexpr, m_block: tl.constexpr, n_block: tl.constexpr, k_block: tl.constexpr, near: tl.constexpr,
    ragged: tl.constexpr, stages: tl.constexpr, exact: tl.constexpr,
):  # fmt: skip
    """``values [M, depth] @ basis [depth, wide]`` rounded, as ``codes [components, T]`` of each cell."""
    m, n = _ordered(tl.program_id(0), tl.num_programs(0), wide // n_block, near)
    total = tl.zeros([m_block, n_block], tl.float32)
    for k in tl.range(0, depth, k_block, num_stages=stages):
        total += product(values.load([m * m_block, k]), basis.load([k, n * n_block]), exact)
    columns = n * n_block + tl.arange(0, n_block)
    y = total
    index = m * m_block // cell
    job = jobs + index * 4
    t = m % (cell // m_block) * m_block + tl.arange(0, m_block)
    if ragged:
        tokens = tl.load(job + 2)
        real = t < tokens
        y = tl.where(real[:, None], y, 0.0)
    else:
        tokens = cell
    tl.atomic_add(energy + index, tl.sum(tl.sum(y * y, 1), 0))
    largest = tl.max(tl.max(tl.abs(y), 1), 0)
    code = ((y + ROUND).to(tl.int32, bitcast=True) + MIDDLE).to(tl.uint8)
    into = tl.multiple_of(codes + tl.load(job + 1), 16) + (columns[:, None] * tokens + t[None, :])
    inside = (columns < components)[:, None]
    tl.store(into, tl.trans(code), mask=inside & real[None, :] if ragged else inside)
    tl.store(ok + index, 0, mask=(largest < 127.5) == 0)


@triton.jit
def turn_kernel(jobs, codes, rows_out, components, wide, cell: tl.constexpr, block: tl.constexpr):
    """Program (job, components, tokens): codes ``[components, T]`` to whole numbers ``[T, wide]`` in bf16."""
    job = jobs + tl.program_id(0) * 4
    n = tl.program_id(1) * block + tl.arange(0, block)
    t = tl.program_id(2) * block + tl.arange(0, block)
    tokens = tl.load(job + 2)
    inside = (n < components)[:, None] & (t < tokens)[None, :]
    source = codes + tl.load(job + 1) + n[:, None].to(tl.int64) * tokens + t[None, :]
    q = tl.load(source, mask=inside, other=127).to(tl.float32) - 127.0
    into = rows_out + (tl.program_id(0) * cell + t)[:, None].to(tl.int64) * wide + n[None, :]
    tl.store(into, tl.trans(q).to(tl.bfloat16))


@triton.jit
def decode_kernel(
    values, basis, bias, jobs, cos, sin, between, depth, wide,
    dim: tl.constexpr, cell: tl.constexpr, m_block: tl.constexpr, n_block: tl.constexpr, k_block: tl.constexpr,
    near: tl.constexpr, turned: tl.constexpr, stages: tl.constexpr, exact: tl.constexpr,
):  # fmt: skip
    """``values [M, depth] @ basis [depth, wide] + bias`` to the job's heads; ``n_block``: ``dim`` if turned."""
    m, n = _ordered(tl.program_id(0), tl.num_programs(0), wide // n_block, near)
    total = tl.zeros([m_block, n_block], tl.float32)
    for k in tl.range(0, depth, k_block, num_stages=stages):
        total += product(values.load([m * m_block, k]), basis.load([k, n * n_block]), exact)
    columns = n * n_block + tl.arange(0, n_block)
    x = total + tl.load(bias + columns)[None, :]
    job = jobs + m * m_block // cell * 4
    t = m % (cell // m_block) * m_block + tl.arange(0, m_block)
    real = (t < tl.load(job + 2))[:, None]
    if turned > 0:
        # Halves of a head lie in one thread: a channel and its partner.
        half: tl.constexpr = turned // 2
        c = tl.arange(0, half)
        angle = (tl.load(job + 3) + t)[:, None] * half + c[None, :]
        turn, shift = tl.load(cos + angle, mask=real, other=0.0), tl.load(sin + angle, mask=real, other=0.0)
        if turned < dim:
            k, v = _halves(x, m_block, dim)
            a, b = _halves(k, m_block, turned)
            x = _joined(_joined(a * turn - b * shift, b * turn + a * shift, m_block, turned), v, m_block, dim)
        else:
            a, b = _halves(x, m_block, dim)
            x = _joined(a * turn - b * shift, b * turn + a * shift, m_block, dim)
    stride = tl.load(job + 2) * between * dim
    start = tl.multiple_of(tl.load(job).to(tl.pointer_type(tl.bfloat16)), 16)
    first = tl.multiple_of(start + n * n_block // dim * stride, 8)
    if n_block > dim:
        into = first + (tl.arange(0, n_block) // dim)[None, :] * stride
    else:
        into = first + (n * n_block % dim) + tl.zeros([1, n_block], tl.int32)
    into += t[:, None] * dim + (tl.arange(0, n_block) % dim)[None, :]
    tl.store(into, to_bf16(x, exact), mask=real)


@triton.jit
def _ordered(program, programs, columns, near: tl.constexpr):
    """Programs in an order that keeps ``near`` rows of tiles in the cache while all columns pass."""
    rows = programs // columns
    first = program // (near * columns) * near
    height = tl.minimum(rows - first, near)
    return first + program % (near * columns) % height, program % (near * columns) // height


@triton.jit
def _halves(x, rows: tl.constexpr, columns: tl.constexpr):
    return tl.split(x.reshape(rows, 2, columns // 2).permute(0, 2, 1))


@triton.jit
def _joined(a, b, rows: tl.constexpr, columns: tl.constexpr):
    return tl.join(a, b).permute(0, 2, 1).reshape(rows, columns)
