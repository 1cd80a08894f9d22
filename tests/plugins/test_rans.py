from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvserve_core.errors import FrameError
from kvserve_core.tensor import Part
from kvserve_plugins.codecs import rans as module
from kvserve_plugins.codecs.rans import Rans
from kvserve_plugins.codecs.zstd import Zstd
from kvserve_plugins.kernels import rans_lanes, rans_make, rans_pack
from kvserve_plugins.kernels.blobs import blob_of
from kvserve_plugins.kernels.rans_model import fit, low_bits, rounded_shift, unshifted
from kvserve_plugins.kernels.rans_set import PUBLISHED
from kvserve_plugins.kernels.rans_tables import COUNTS, FREQUENCIES, TOTAL, ZERO
from plugins import rans_reference
from plugins.stage_checks import codes, same_bits, shell

RANS = Rans(Rans.Config())
DOC = Path(__file__).parents[2] / "docs" / "rans-format.md"
GOLDEN = (
    "00393f3a1b5559192551010055b14900f5e3e6432410fe0fee5afd35a74ecaaf02d2439c4679885f87cb418f4c4b24dc9b22"
    "ede1fff05a849859dc12ad1ce7d1ca1b5885cbc455ccd091f7ebf4dc9681086f5db4baa85e0b89075a3e2337af66"
)


@pytest.fixture(autouse=True, scope="module", params=["numba", "numpy"])
def loops(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything here holds for the loops in machine code and for those in NumPy."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            patch.setattr(rans_lanes, "native", lambda: None)
        else:
            pytest.importorskip("numba", reason="numba is an extra: pip install 'kvserve[fast]'")
        yield


def part_of(q: NDArray[np.integer], alphabet: int = 255) -> Part:
    dtype = torch.uint8 if alphabet <= 256 else torch.int16
    made = torch.from_numpy(np.asarray(q).astype(np.int64) + (alphabet - 1) // 2).to(dtype)
    return Part(made.reshape(-1), alphabet, len(q))


def klt(
    rows: int, columns: int = 256, top: float = 12.0, bottom: float = 0.1, seed: int = 0, mixed: bool = False
) -> NDArray[np.integer]:
    """Codes like those of a KLT: a geometric spectrum of sigmas; every second row, or any value, is Laplace."""
    draw = np.random.default_rng(seed)
    normal, laplace = draw.normal(size=(rows, columns)), draw.laplace(0, 0.5**0.5, (rows, columns))
    first = draw.random((rows, columns)) < 0.5 if mixed else np.arange(rows)[:, None] % 2 == 1
    x = np.where(first, normal, laplace) * np.geomspace(top, bottom, rows)[:, None]
    return np.clip(np.rint(x), -127, 127).astype(np.int32)


def blob(part: Part) -> bytes:
    return bytes(RANS.encode([part])[0].data.tolist())


def decoded(data: bytes, part: Part) -> torch.Tensor:
    return RANS.decode([blob_of(data)], [shell(part)])[0]


def ideal_bytes(q: NDArray[np.integer]) -> float:
    """Cross-entropy under the best table of each row, shifts aside, escapes at no cost beyond their symbol."""
    symbols = np.where(np.abs(q)[..., None] > PUBLISHED.radius[:63], 31, q[..., None] + 15)
    cost = PUBLISHED.bits[np.arange(63), symbols].sum(1).min(1)
    return float(cost[q.any(1)].sum()) / 8


def test_tables_are_what_the_formula_gives() -> None:
    assert tuple(rans_make.tables()) == COUNTS


def test_tables_are_what_the_document_publishes() -> None:
    assert blake3(FREQUENCIES[:64].astype("<u2").tobytes()).hexdigest() in DOC.read_text()
    assert (FREQUENCIES.sum(1) == TOTAL).all()
    assert (FREQUENCIES[:, :15] == FREQUENCIES[:, 30:15:-1])[:64].all()
    assert ((FREQUENCIES[:63] > 0).sum(1) == 2 * PUBLISHED.radius[:63] + 2).all()
    assert (FREQUENCIES[:63, 31] >= 1).all()


def test_slots_invert_the_counts() -> None:
    entries = PUBLISHED.slots.reshape(-1, TOTAL)
    for table, counts in zip(entries, FREQUENCIES, strict=True):
        assert np.array_equal(np.bincount(table & 31, minlength=32), counts)
        assert np.array_equal((table >> 17) + 1, counts[table & 31])
        assert np.array_equal(
            np.flatnonzero((table >> 5 & TOTAL - 1) == 0), np.cumsum(counts)[counts > 0] - counts[counts > 0]
        )


@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (40, 1), (20, 12), (64, 33), (300, 5)])
@pytest.mark.parametrize("scale", [0.02, 1.0, 9.0, 3000.0])
def test_a_decoder_written_from_the_document_agrees(shape: tuple[int, int], scale: float) -> None:
    draw = np.random.default_rng(7)
    x = draw.laplace(size=shape) * np.geomspace(scale, scale / 30, shape[0])[:, None] * draw.uniform(0.3, 3, shape[1])
    part = part_of(np.clip(np.rint(x), -16383, 16383), 32767)
    assert rans_reference.decode(blob(part), *shape, 32767) == part.codes.tolist()


def test_golden_blob_decodes_for_ever() -> None:
    part = part_of(klt(12, 16, top=40.0))
    assert decoded(bytes.fromhex(GOLDEN), part).tolist() == part.codes.tolist()
    assert rans_reference.decode(bytes.fromhex(GOLDEN), 12, 16, 255) == part.codes.tolist()


@pytest.mark.parametrize(("rows", "top", "bottom"), [(400, 5.0, 0.2), (1900, 5.0, 0.1)])
def test_size_is_near_the_cross_entropy_of_the_tables(rows: int, top: float, bottom: float) -> None:
    for mixed, most in ((True, 1.015), (False, 1.018)):  # rows of two shapes: the ideal picks each row's for nothing
        q = klt(rows, top=top, bottom=bottom, mixed=mixed)
        assert len(blob(part_of(q))) <= most * ideal_bytes(q)


def test_size_is_that_of_constriction() -> None:
    constriction = pytest.importorskip("constriction", reason="golden model for the size; pip install constriction")
    q = klt(400, top=4.0)
    _, sections = rans_pack._sections(q, fit(q))
    symbols, tables = np.concatenate(sections.symbols), np.concatenate(sections.tables)
    coder = constriction.stream.stack.AnsCoder()
    family = constriction.stream.model.Categorical(perfect=False)
    coder.encode_reverse(symbols.astype(np.int32), family, FREQUENCIES[tables].astype(np.float32))
    header_and_states = 12 + 4 * (1 << rans_pack._lane_bits(sections))
    assert abs(len(blob(part_of(q))) - header_and_states / 3 - coder.num_bits() / 8) < 0.01 * coder.num_bits() / 8


def test_far_below_zstd_on_the_same_codes() -> None:
    part = part_of(klt(800, top=5.0))
    assert len(blob(part)) < 0.93 * int(Zstd(Zstd.Config()).encode([part])[0].nbytes)


def test_loud_and_quiet_tokens_pay_off() -> None:
    draw = np.random.default_rng(3)
    loud = np.exp(draw.normal(size=256) * 0.3)
    q = np.rint(draw.normal(size=(300, 256)) * np.geomspace(5, 0.2, 300)[:, None] * loud).astype(np.int32)
    assert fit(q).columns.any()
    assert len(blob(part_of(q))) < 0.98 * ideal_bytes(q)


def test_tokens_alike_take_no_offsets() -> None:
    assert not fit(klt(400, top=2.0)).columns.any()


def test_zeros_cost_a_header() -> None:
    part = part_of(np.zeros((1900, 256), np.int32))
    assert len(blob(part)) == 16
    assert same_bits(decoded(blob(part), part), part.codes)


def test_rows_of_zeros_cost_next_to_nothing() -> None:
    q = klt(200, top=4.0)
    more = np.concatenate((q, np.zeros((1700, 256), np.int32)))
    assert len(blob(part_of(more))) <= 1.01 * len(blob(part_of(q)))


def test_rows_may_jump_over_the_whole_ladder() -> None:
    q = np.zeros((9, 64), np.int32)
    q[1::2] = np.random.default_rng(1).integers(-16383, 16384, (4, 64))
    part = part_of(q, 32767)
    assert same_bits(decoded(blob(part), part), part.codes)


@given(st.integers(0, 12), st.lists(st.integers(-16384, 16383), min_size=1, max_size=20))
@settings(max_examples=100, deadline=None)
def test_shifted_values_and_low_bits_join(shift: int, numbers: list[int]) -> None:
    q, k = np.array([numbers], np.int32), np.array([shift], np.int32)
    low = low_bits(q, k)
    assert low.min() >= 0
    assert low.max() < 1 << shift
    assert np.array_equal(unshifted(rounded_shift(q, k), low, k), q)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_codes_come_back(data: st.DataObject) -> None:
    alphabet = data.draw(st.sampled_from([1, 2, 3, 31, 32, 255, 256, 32767, 32768]))
    rows, columns = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 9))
    at = st.integers(0, alphabet - 1) | st.just((alphabet - 1) // 2)
    made = data.draw(st.lists(at, min_size=rows * columns, max_size=rows * columns))
    part = Part(torch.tensor(made, dtype=torch.uint8 if alphabet <= 256 else torch.int16), alphabet, rows)
    coded = blob(part)
    assert len(coded) <= RANS.bound(part)
    assert same_bits(decoded(coded, part), part.codes)


def test_a_batch_in_several_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [part_of(klt(r, 16, seed=r)) for r in (1, 9, 30, 2, 17)]
    whole = [blob(p) for p in parts]
    monkeypatch.setattr(module, "AT_ONCE", 200)
    assert [bytes(e.data.tolist()) for e in RANS.encode(parts)] == whole
    monkeypatch.setattr(module, "MAX_PARTS", 1)
    back = RANS.decode([blob_of(b) for b in whole], [shell(p) for p in parts])
    assert all(same_bits(a, p.codes) for a, p in zip(back, parts, strict=True))


def test_one_bad_blob_spoils_a_batch_with_a_frame_error() -> None:
    part = part_of(klt(40, 32))
    good = blob(part)
    bad = good[:-2]
    with pytest.raises(FrameError):
        RANS.decode([blob_of(good), blob_of(bad)], [shell(part)] * 2)


HEADS = {
    "lanes": (0, 17),
    "row table": (1, 64),
    "column table": (2, 64),
    "class table": (3, 64),
    "first row": (4, 55),
    "shape": (5, 3),
    "spare bits": (11, 0x80),
}


@pytest.mark.parametrize("field", HEADS)
def test_headers_that_mean_nothing(field: str) -> None:
    part = part_of(klt(40, 32))
    data = bytearray(blob(part))
    data[HEADS[field][0]] = HEADS[field][1]
    with pytest.raises(FrameError, match=r"mean nothing|do not exist"):
        decoded(bytes(data), part)


@pytest.mark.parametrize("keep", [0, 1, 11, 12, 15, 17])
def test_blobs_cut_short(keep: int) -> None:
    part = part_of(klt(40, 32))
    with pytest.raises(FrameError):
        decoded(blob(part)[:keep], part)


def test_words_left_over_and_states_too_low() -> None:
    part = part_of(klt(40, 32))
    data = blob(part)
    with pytest.raises(FrameError, match="end elsewhere"):
        decoded(data + b"\0\0", part)
    with pytest.raises(FrameError, match="below 65536"):
        decoded(data[:12] + bytes(4) + data[16:], part)
    with pytest.raises(FrameError, match="without codes"):
        decoded(data, codes(0, 255))


def test_too_much_work_for_a_lane_is_refused() -> None:
    one_lane = bytes((0, ZERO, ZERO, ZERO, 5)) + bytes(7) + (65536).to_bytes(4, "little")
    with pytest.raises(FrameError, match="8192 a lane"):
        decoded(one_lane, Part(torch.zeros(8193, dtype=torch.uint8), 255))


def test_flipped_bits_of_states_and_words_are_noticed() -> None:
    part = part_of(klt(40, 64, top=4.0))  # no plain bits, which a flip turns into others
    data, missed = blob(part), 0
    places = range(12, len(data), 29)
    for at in places:
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 8
        try:
            decoded(bytes(flipped), part)
            missed += 1  # the last symbol of a lane may become another of the same count
        except FrameError:
            pass
    assert missed <= len(places) // 20


@given(st.binary(max_size=200), st.integers(0, 6), st.integers(1, 40), st.sampled_from([2, 255, 32767]))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_a_frame_error_or_the_right_length(data: bytes, rows: int, columns: int, alphabet: int) -> None:
    part = codes(rows * columns, alphabet, rows=max(rows, 1))
    header = bytes((data[0] % 3, *(b % 64 for b in data[1:4]), data[4] % 55)) + bytes(7) if len(data) > 20 else b""
    for each in (data, header + data[5:]):
        try:
            back = decoded(each, part)
        except FrameError:
            continue
        assert back.numel() == rows * columns
        assert back.dtype == part.codes.dtype
