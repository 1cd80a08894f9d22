"""The Triton kernels around nvCOMP: chunks to one blob a part, the way back, and which parts decoded. Needs a GPU.

``plan`` is an i64 table of ``chunks`` columns, the same for every batch of these lengths: bytes of the chunk, its slot,
its bound, the first chunk of its part, chunks of its part, its part, where the part's blob begins, the blob's capacity.
"""

import triton
import triton.language as tl

BLOCK = 2048


@triton.jit
def pack_kernel(plan, slots, sizes, status, blobs, totals, chunks, width: tl.constexpr, block: tl.constexpr):  # noqa: ANN001, ANN201  # Triton compiles this; it takes no Python types
    """Program c: chunk c from its slot to its place in its part's blob, with the padding zeroed."""
    c = tl.program_id(0)
    slot, bound = tl.load(plan + chunks + c), tl.load(plan + 2 * chunks + c)
    first, count = tl.load(plan + 3 * chunks + c), tl.load(plan + 4 * chunks + c)
    blob, cap = tl.load(plan + 6 * chunks + c), tl.load(plan + 7 * chunks + c)
    header = (count * 4 + 15) // 16 * 16
    k = tl.arange(0, width)
    mine = k < count
    n = tl.load(sizes + first + k, mask=mine, other=0)
    failed = tl.sum((tl.load(status + first + k, mask=mine, other=0) != 0).to(tl.int32)) > 0
    padded = (n + 15) // 16 * 16
    at = header + tl.sum(tl.where(k < c - first, padded, 0))
    size = tl.minimum(tl.load(sizes + c), bound)
    source = tl.multiple_of((slots + slot).to(tl.pointer_type(tl.int64)), 16)
    into = tl.multiple_of((blobs + blob + at).to(tl.pointer_type(tl.int64)), 16)
    for start in range(0, (size + 15) // 16 * 2, block):
        i = start + tl.arange(0, block)
        left = size - 8 * i
        word = tl.load(source + i, mask=left > 0, other=0)
        keep = (tl.full([block], 1, tl.int64) << (8 * tl.minimum(tl.maximum(left, 1), 7))) - 1
        word = tl.where(left < 8, word & keep, word)
        tl.store(into + i, word, mask=(8 * i < (size + 15) // 16 * 16) & (at + 8 * i < cap))
    if c == first:
        heads = (blobs + blob).to(tl.pointer_type(tl.int32))
        tl.store(heads + k, n.to(tl.int32), mask=k < header // 4)
        exact = header + tl.sum(tl.where(k < count - 1, padded, tl.where(k == count - 1, n, 0)))
        tl.store(totals + tl.load(plan + 5 * chunks + c), tl.where(failed, cap, exact))


@triton.jit
def unpack_kernel(plan, call, chunks, width: tl.constexpr):  # noqa: ANN001, ANN201  # as above
    """Program c: address and size of chunk c from its blob's header, never beyond the blob; size 0 where it lies."""
    c = tl.program_id(0)
    blob, limit = tl.load(call + c), tl.load(call + chunks + c)
    first, count = tl.load(plan + 3 * chunks + c), tl.load(plan + 4 * chunks + c)
    k = tl.arange(0, width)
    n = tl.load(blob.to(tl.pointer_type(tl.int32)) + k, mask=k < count, other=0).to(tl.int64)
    n = tl.where(n < 0, limit, tl.minimum(n, limit))
    at = (count * 4 + 15) // 16 * 16 + tl.sum(tl.where(k < c - first, (n + 15) // 16 * 16, 0))
    size = tl.sum(tl.where(k == c - first, n, 0))
    good = at + size <= limit
    tl.store(call + 3 * chunks + c, tl.where(good, blob + at, blob))
    tl.store(call + 4 * chunks + c, tl.where(good, size, 0))


@triton.jit
def verdict_kernel(plan, actual, status, ok, chunks, block: tl.constexpr):  # noqa: ANN001, ANN201  # as above
    """Clear ``ok`` of every part that has a chunk with an error status or of another length."""
    c = tl.program_id(0) * block + tl.arange(0, block)
    mine = c < chunks
    length, got = tl.load(plan + c, mask=mine, other=0), tl.load(actual + c, mask=mine, other=0)
    bad = (tl.load(status + c, mask=mine, other=0) != 0) | (length != got)
    tl.store(ok + tl.load(plan + 5 * chunks + c, mask=mine, other=0), tl.zeros([block], tl.int8), mask=mine & bad)
