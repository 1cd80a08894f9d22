"""The Triton kernel of :mod:`kvserve_vllm.paged_copy`."""

import triton
import triton.language as tl


@triton.jit
def copy_kernel(
    bases, blocks, flat, tokens, start, null, block_stride, head_stride, token_stride, heads,
    size: tl.constexpr, dim: tl.constexpr, padded: tl.constexpr, rows: tl.constexpr, out: tl.constexpr,
):  # fmt: skip
    """Rows of a tile of one head of one layer, out of the blocks (``out``) or into them.

    bases: address of each layer's first wanted head. blocks: numbers of the request's blocks from the one that holds
    token ``start`` (counted within it) on. flat: ``[L, H, T, D]``, contiguous. Block ``null`` is not written.
    """
    token = tl.program_id(0) * rows + tl.arange(0, rows)
    head, layer = tl.program_id(1), tl.program_id(2)
    real = token < tokens
    place = token + start
    block = tl.load(blocks + place // size, mask=real, other=0)
    base = tl.load(bases + layer).to(flat.dtype)
    paged = base + block * block_stride + head * head_stride + (place % size).to(tl.int64) * token_stride
    column = tl.arange(0, padded)
    inside = column < dim
    row = (layer.to(tl.int64) * heads + head) * tokens + token
    there = paged[:, None] + column[None, :]
    here = flat + row[:, None] * dim + column[None, :]
    if out:
        mask = real[:, None] & inside[None, :]
        tl.store(here, tl.load(there, mask=mask), mask=mask)
    else:
        mask = (real & (block != null))[:, None] & inside[None, :]
        tl.store(there, tl.load(here, mask=mask), mask=mask)
