"""xxh3-64 of 16 KiB pieces on a GPU: what a segment's digest is made of, without its bytes crossing to the host.

The long form of XXH3 without a seed (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md, "XXH3 Algorithm"): eight
sums of 64 bits over stripes of 64 bytes, scrambled after every 16. Within these 16 the order does not matter, so they
are added up side by side. ``words``: 24 of the secret at multiples of 8 bytes, 8 from byte 121, 8 from byte 11, the 8
initial sums. A piece, two i64, is an address and a length, a multiple of 64 of at least 256.
"""

import triton
import triton.language as tl

PRIME32_1 = tl.constexpr(0x9E3779B1)
PRIME64_1 = tl.constexpr(0x9E3779B185EBCA87)
AVALANCHE = tl.constexpr(0x165667919E3779F9)


@triton.jit
def digest_kernel(pieces, words, hashes, count, blocks: tl.constexpr, wide: tl.constexpr):
    """Program p: ``wide`` pieces of at most ``blocks`` KiB, a KiB of each at a time."""
    p = tl.program_id(0) * wide + tl.arange(0, wide)
    mine = p < count
    start = tl.load(pieces + 2 * p, mask=mine, other=0).to(tl.pointer_type(tl.uint64))
    length = tl.load(pieces + 2 * p + 1, mask=mine, other=0)
    i, s = tl.arange(0, 8), tl.arange(0, 16)
    key = tl.load(words + s[:, None] + i[None, :]).to(tl.uint64, bitcast=True)[None, :, :]
    scramble = tl.load(words + 16 + i).to(tl.uint64, bitcast=True)[None, :]
    sums = tl.load(words + 40 + i).to(tl.uint64, bitcast=True)[None, :] + tl.zeros([wide, 8], tl.uint64)
    source = start[:, None, None] + (s[:, None] * 8 + i[None, :])[None, :, :]
    before, full = length // 64 - 1, (length - 1) // 1024
    for n in tl.range(0, blocks, num_stages=3):
        real = (s[None, :] + n * 16 < before[:, None])[:, :, None]
        data = tl.load(source + n * 128, mask=real, other=0)
        sums += tl.sum(tl.where(real, _mixed(data, key, wide * 16), tl.zeros_like(data)), 1)
        scrambled = (sums ^ (sums >> 47) ^ scramble) * PRIME32_1
        sums = tl.where((n < full)[:, None], scrambled, sums)
    last = tl.load(start[:, None] + (length // 8 - 8)[:, None] + i[None, :], mask=mine[:, None], other=0)
    sums += _mixed(last, tl.load(words + 24 + i).to(tl.uint64, bitcast=True)[None, :], wide)
    sums ^= tl.load(words + 32 + i).to(tl.uint64, bitcast=True)[None, :]
    a, b = tl.split(sums.reshape(wide, 4, 2))
    h = tl.sum((a * b) ^ tl.umulhi(a, b), 1) + length.to(tl.uint64) * PRIME64_1
    h = (h ^ (h >> 37)) * AVALANCHE
    tl.store(hashes + p, (h ^ (h >> 32)).to(tl.int64, bitcast=True), mask=mine)


@triton.jit
def _mixed(data, key, rows: tl.constexpr):
    """What 64 bytes add to the eight sums: a product of their halves, and their neighbour's value."""
    a, b = tl.split(data.reshape(rows, 4, 2))
    neighbour = tl.join(b, a).reshape(data.shape)
    keyed = data ^ key
    return neighbour + (keyed & 0xFFFFFFFF) * (keyed >> 32)
