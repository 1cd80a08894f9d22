from __future__ import annotations

import sys
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve_core.errors import FrameError
from kvserve_core.spec import DType
from kvserve_core.tensor import TORCH
from kvserve_plugins.kernels import bits, blobs, hadamard, minmax, radix, ranking, signs
from kvserve_plugins.kernels.norms import BF16_MAX
from plugins.stage_checks import FLOATS, any_bits, same_bits

U64 = np.uint64


@pytest.mark.parametrize(
    ("n", "expected"), [(1, (1,)), (64, (64,)), (80, (64, 16)), (96, (64, 32)), (100, (64, 32, 4))]
)
def test_pieces_are_greedy(n: int, expected: tuple[int, ...]) -> None:
    assert hadamard.pieces(n) == expected


@pytest.mark.parametrize("n", [1, 2, 32, 64, 80, 96, 100, 128, 256, 576])
@pytest.mark.parametrize("gemm", [False, True])
def test_sums_are_the_product_with_the_matrix(n: int, gemm: bool) -> None:
    x = torch.randint(-50, 50, (2, 9, n), generator=torch.Generator().manual_seed(n)).float()
    assert torch.equal(hadamard.sums(x, gemm=gemm), x @ hadamard.matrix(n))  # integers: exact in any order


@pytest.mark.parametrize("n", [32, 96, 128])
def test_fwht_is_its_own_inverse_and_keeps_norms(n: int) -> None:
    x = torch.randn(5, 3, n, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(hadamard.fwht(hadamard.fwht(x)), x)
    torch.testing.assert_close(hadamard.fwht(x).norm(dim=-1), x.norm(dim=-1))


def test_natural_order_of_the_hadamard_matrix() -> None:
    h2 = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    assert torch.equal(hadamard.matrix(8), torch.kron(h2, torch.kron(h2, h2)))


def test_products_are_probed_for_lower_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hadamard.gemm_is_exact()
    rough = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: rough(a.bfloat16(), b.bfloat16()).float())
    assert not hadamard.gemm_is_exact()


def test_splitmix64_matches_the_published_sequence() -> None:
    golden = U64(0x9E3779B97F4A7C15)
    states = np.arange(3, dtype=U64) * golden  # seed 0
    assert [hex(v) for v in signs.splitmix64(states)] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]


def scalar_sign(seed: int, layer: int, head: int, channel: int) -> int:
    """The recipe of the docstring in Python integers."""
    mask = 2**64 - 1

    def following(state: int) -> int:
        z = (state + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    key = following(following(following(seed) ^ layer) ^ head)
    word = following((key + channel // 64 * 0x9E3779B97F4A7C15) & mask)
    return -1 if word >> channel % 64 & 1 else 1


@pytest.mark.parametrize("seed", [0, 0x3333, 2**63 - 1])
def test_signs_follow_the_recipe(seed: int) -> None:
    layers, heads, dim = (0, 7, 61), (3, 0), 130
    expected = [[[scalar_sign(seed, y, h, d) for d in range(dim)] for h in heads] for y in layers]
    assert signs.signs(seed, layers, heads, dim).tolist() == expected


def test_signs_are_balanced_and_differ_by_place() -> None:
    made = signs.signs(0x3333, range(32), range(8), 128)
    assert abs(made.mean()) < 0.02
    assert len({row.tobytes() for row in made.reshape(-1, 128)}) == 256


@pytest.mark.parametrize("dtype", FLOATS)
def test_byte_planes_keep_every_bit(dtype: DType) -> None:
    x = any_bits(dtype, (7, 64))
    planes = bits.byte_planes(x)
    assert len(planes) == dtype.itemsize
    assert same_bits(bits.join_planes(planes, TORCH[dtype]), x.view(-1))


def test_all_bf16_and_f16_patterns() -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        x = every.view(dtype)
        assert same_bits(bits.join_planes(bits.byte_planes(x), dtype), x)


def test_the_first_plane_is_the_exponent() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        exponent, *_, last = bits.byte_planes(torch.tensor([1.0, -1.0, -2.0, 0.5], dtype=dtype))
        assert exponent.tolist() == [127, 127, 128, 126]
        assert last.tolist() == [0, 1, 1, 0]
    assert bits.byte_planes(torch.tensor([-1.0, 1.5]).half())[0].tolist() == [15 << 3, (15 << 3) + 4]


def test_bytes_of_a_misaligned_buffer() -> None:
    room = torch.arange(9, dtype=torch.uint8)
    assert bits.from_bytes(room[1:], torch.int16).tolist() == [0x0201, 0x0403, 0x0605, 0x0807]
    assert bits.from_bytes(room[:8], torch.int16).data_ptr() == room.data_ptr()


@pytest.mark.parametrize(
    ("alphabet", "digits", "nbytes"),
    [
        (1, 1, 0),
        (2, 8, 1),
        (3, 5, 1),
        (4, 4, 1),
        (6, 3, 1),
        (8, 8, 3),
        (12, 11, 5),
        (16, 2, 1),
        (256, 1, 1),
        (257, 5, 6),
        (32768, 1, 2),
    ],
)
def test_layouts(alphabet: int, digits: int, nbytes: int) -> None:
    assert radix.layout(alphabet) == (digits, nbytes)


@pytest.mark.parametrize("alphabet", [*range(2, 300), 1000, 4096, 32767, 32768])
def test_no_layout_is_larger_than_whole_bits_in_bytes_or_leaves_exact_f64(alphabet: int) -> None:
    digits, nbytes = radix.layout(alphabet)
    whole_bits = (alphabet - 1).bit_length()
    best = {7: 7 if alphabet <= 115 else 8}.get(whole_bits, whole_bits if whole_bits <= 8 else 16)
    assert 8 * nbytes / digits <= best
    assert alphabet**digits <= 256**nbytes <= 2**48


def test_packed_bytes_to_the_bit() -> None:
    packed = radix.pack(torch.tensor([1, 2, 3, 4, 5], dtype=torch.uint8), 6)
    assert packed.tolist() == [1 + 3 * 6 + 5 * 36, 2 + 4 * 6]  # two groups: codes 0, 2, 4 and codes 1, 3, padding
    twelve = radix.pack(torch.full((11,), 11, dtype=torch.uint8), 12)
    assert bytes(twelve.tolist()) == (12**11 - 1).to_bytes(5, "little")


@given(st.integers(2, 32768), st.integers(0, 200), st.integers(0, 2**32 - 1))
@settings(max_examples=200, deadline=None)
def test_pack_round_trip(alphabet: int, count: int, seed: int) -> None:
    dtype = torch.uint8 if alphabet <= 256 else torch.int16
    rng = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, alphabet, (count,), generator=rng).to(dtype)
    codes[: count // 2] = alphabet - 1 if alphabet <= 256 or seed % 2 else 0
    data = radix.pack(codes, alphabet)
    assert data.numel() == radix.layout(alphabet).size(count)
    back, canonical = radix.unpack(data, count, alphabet, dtype)
    assert canonical
    assert same_bits(back, codes)


@given(st.integers(2, 32768), st.data())
@settings(max_examples=100, deadline=None)
def test_unpack_of_any_bytes_is_in_the_alphabet_or_not_canonical(alphabet: int, data: st.DataObject) -> None:
    plan = radix.layout(alphabet)
    count = 3 * plan.digits - 1 if plan.digits > 1 else 3
    raw = data.draw(st.binary(min_size=plan.size(count), max_size=plan.size(count)))
    dtype = torch.uint8 if alphabet <= 256 else torch.int16
    back, canonical = radix.unpack(torch.tensor(list(raw), dtype=torch.uint8), count, alphabet, dtype)
    if canonical:
        assert bytes(radix.pack(back, alphabet).tolist()) == raw


def test_low_heads_are_ranked_globally_with_stable_ties() -> None:
    scores = ((0.3, 0.1, 0.5), (0.1, 0.1, 0.9))
    assert ranking.low_heads(scores, 1 / 3).tolist() == [[False, True, False], [True, False, False]]
    assert ranking.low_heads(scores, 0.5).tolist() == [[False, True, False], [True, True, False]]
    assert not ranking.low_heads(scores, 0.0).any()
    assert ranking.low_heads(scores, 1.0).all()


@pytest.mark.parametrize(("ratio", "count"), [(0.25, 1), (0.5, 1), (0.75, 2), (0.1, 0)])
def test_the_number_of_low_heads_rounds_half_up(ratio: float, count: int) -> None:
    assert ranking.low_heads(((0.0, 1.0),), ratio).sum() == count


def test_decimal_ratios_round_as_written() -> None:
    table = (tuple(float(i) for i in range(100)),)
    assert 0.145 * 100 < 14.5  # what binary arithmetic would round down
    assert ranking.low_heads(table, 0.145).sum() == 15


def test_rectangles_cover_each_cell_once() -> None:
    for cells in product([False, True], repeat=6):
        chosen = np.array(cells).reshape(3, 2)
        covered = np.zeros((3, 2), int)
        for rows, columns in ranking.rectangles(chosen):
            assert columns
            covered[np.ix_(rows, columns)] += 1
        assert (covered == chosen).all()
    assert len(ranking.rectangles(np.ones((3, 2), bool))) == 1


def test_a_blob_of_another_length_is_refused() -> None:
    assert blobs.payload(blobs.blob(torch.zeros(3, dtype=torch.uint8))).numel() == 3
    with pytest.raises(FrameError, match="'raw' got 3 bytes, expected 4"):
        blobs.exactly(torch.zeros(3, dtype=torch.uint8), 4, "raw")


finite_f32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(finite_f32, min_size=1, max_size=20), st.integers(2, 300), st.sampled_from(["bf16", "f32"]))
@settings(max_examples=400, deadline=None)
def test_error_bound_of_any_finite_group(xs: list[float], levels: int, params: minmax.ParamDType) -> None:
    x = torch.tensor(xs, dtype=torch.float32).view(1, -1)
    cells = minmax.grid(x, (1,), levels, params)
    codes = minmax.quantize(x, cells, levels)
    assert 0 <= int(codes.min()) <= int(codes.max()) < levels
    back = minmax.dequantize(codes, cells, levels).double()
    scale, largest = cells.scale.double(), x.double().abs().max()
    spread = x.double().max() - x.double().min()
    beyond = spread * (1 + 2**-7) / (levels - 1) > BF16_MAX  # scale saturates
    steps = (1 if beyond else 0.5) + levels * 2**-22
    limit = BF16_MAX if params == "bf16" else minmax.F32_MAX
    assert back.isfinite().all()
    assert ((back - x.double().clamp(-limit, limit)).abs() <= scale * steps + 2**-22 * largest).all()


@given(st.lists(finite_f32, min_size=2, max_size=20), st.integers(2, 300))
@settings(max_examples=200, deadline=None)
def test_scale_is_close_to_the_range_over_the_steps(xs: list[float], levels: int) -> None:
    x = torch.tensor(xs).to(torch.bfloat16).float().clamp(-1e38, 1e38).view(1, -1)
    scale = minmax.grid(x, (1,), levels, "bf16").scale.double()
    ideal = (x.double().max() - x.double().min()) / (levels - 1)
    slack = 2**-21 * x.double().abs().max() / (levels - 1)
    assert ((scale <= ideal * (1 + 2**-6) + slack) | (scale <= 2**-126)).all()
    assert (scale >= ideal * (1 - 2**-20) - slack).all()


def test_stored_minimum_of_bf16_data_is_exact() -> None:
    x = torch.randn(4, 50, generator=torch.Generator().manual_seed(3)).bfloat16().float() + 0.0
    assert torch.equal(minmax.grid(x, (1,), 16, "bf16").lo.float(), x.amin(1, keepdim=True))
    below = minmax.grid(x * 1.001, (1,), 16, "bf16").lo.float()
    assert (below <= (x * 1.001).amin(1, keepdim=True)).all()


def test_the_optional_cuda_kernel_is_used_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    hadamard.accelerated.cache_clear()
    monkeypatch.setitem(sys.modules, "fast_hadamard_transform", None)
    assert hadamard.accelerated() is None
    hadamard.accelerated.cache_clear()
    monkeypatch.setitem(
        sys.modules, "fast_hadamard_transform", SimpleNamespace(hadamard_transform=hadamard.butterflies)
    )
    assert hadamard.accelerated() is hadamard.butterflies
    hadamard.accelerated.cache_clear()
