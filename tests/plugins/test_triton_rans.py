"""The kernels of ``rans`` in Triton's interpreter (or on a GPU) against the coder of the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvserve_core.artefacts import NONE
from kvserve_core.errors import FrameError
from kvserve_core.spec import DType, KVSpec, LayerGroup, PlanePart, PlaneSpec, Region
from kvserve_core.tensor import Encoded, Part
from kvserve_plugins.codecs.rans import Rans
from kvserve_plugins.kernels import rans_device, rans_pack
from kvserve_plugins.kernels.rans_device import Kernels
from kvserve_plugins.kernels.rans_fit import tables_of
from kvserve_plugins.kernels.rans_pack import pack
from kvserve_plugins.kernels.rans_set import PUBLISHED, TableSet
from kvserve_plugins.kernels.rans_unpack import Reader
from triton_cases import DEVICE, INTERPRETED

Codes = NDArray[np.int32]
# The interpreter takes a millisecond an operation: large shapes and many seeds are for a GPU.
SHAPES = [(1, 1), (1, 40), (40, 1), (7, 12), (5, 33)] + [(20, 12), (16, 33), (12, 64)] * (not INTERPRETED)
LARGER = [(6, 64), (7, 33), (1, 300), (30, 16)] + [(20, 64), (30, 33), (1, 1500), (150, 16)] * (not INTERPRETED)
SEEDS = 8 if INTERPRETED else 100
KERNELS = Kernels(PUBLISHED, DEVICE)


def drawn(shape: tuple[int, int], scale: float, alphabet: int, seed: int = 7) -> Codes:
    """Centred codes whose rows and columns differ in scale."""
    draw = np.random.default_rng(seed)
    x = draw.laplace(size=shape) * np.geomspace(scale, scale / 30, shape[0])[:, None] * draw.uniform(0.3, 3, shape[1])
    low = -((alphabet - 1) // 2)
    return np.clip(np.rint(x), low, alphabet - 1 + low).astype(np.int32)


def part_of(q: Codes, alphabet: int) -> Part:
    kind = torch.uint8 if alphabet <= 256 else torch.int16
    return Part(torch.from_numpy((q + (alphabet - 1) // 2).reshape(-1)).to(kind).to(DEVICE), alphabet, len(q))


def on_device(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(DEVICE)


def with_lanes(monkeypatch: pytest.MonkeyPatch, bits: int, fast: bool) -> None:
    """Blobs of the CPU with so many lanes, to be read by a kernel made for them or by the one for any number."""
    monkeypatch.setattr(rans_pack, "_lane_bits", lambda *_: bits)
    monkeypatch.setattr(rans_device, "lanes_for", lambda _: bits if fast else 7)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("bits", "fast"), [(5, True), (6, True), (4, False), (9, False)])
@pytest.mark.parametrize(("scale", "alphabet"), [(0.05, 3), (9.0, 255), (90.0, 256), (3000.0, 32767)])
def test_blobs_of_the_cpu_decode(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], bits: int, fast: bool, scale: float, alphabet: int
) -> None:
    with_lanes(monkeypatch, bits, fast)
    q = drawn(shape, scale, alphabet)
    part = part_of(q, alphabet)
    (codes,), ok = KERNELS.decode([on_device(pack([q])[0])], [part], [shape])
    assert ok.tolist() == [1]
    assert torch.equal(codes, part.codes)


@pytest.mark.parametrize("shape", LARGER)
@pytest.mark.parametrize(("scale", "alphabet"), [(0.2, 255), (9.0, 255), (30.0, 256), (3000.0, 32767)])
def test_blobs_of_the_kernels_decode_anywhere(shape: tuple[int, int], scale: float, alphabet: int) -> None:
    q = drawn(shape, scale, alphabet)
    part = part_of(q, alphabet)
    (encoded,) = KERNELS.encode([part], [shape])
    blob, least = encoded.data[: int(encoded.nbytes)], len(pack([q])[0])
    if blob.numel() == part.nbytes:  # sent as it stands, which the states of 32 lanes may tip
        assert least + 4 * 32 + 16 > part.nbytes
        return
    assert np.array_equal(Reader([blob.cpu().numpy()], [shape]).parts()[0], q)
    (codes,), ok = KERNELS.decode([blob], [part], [shape])
    assert ok.tolist() == [1]
    assert torch.equal(codes, part.codes)
    assert blob.numel() - (4 << int(blob[0])) <= 1.06 * least + 16


def test_a_batch_has_the_bytes_of_its_parts_alone() -> None:
    made = [drawn((20, 64), 4.0, 255, 1), drawn((12, 80), 3000.0, 32767, 2), drawn((24, 33), 2.0, 255, 3)]
    parts = [part_of(q, a) for q, a in zip(made, (255, 32767, 255), strict=True)]
    shapes = [q.shape for q in made]
    together = KERNELS.encode(parts, shapes)
    for part, shape, encoded in zip(parts, shapes, together, strict=True):
        (alone,) = KERNELS.encode([part], [shape])
        n = int(alone.nbytes)
        assert n == int(encoded.nbytes) < part.nbytes
        assert torch.equal(alone.data[:n], encoded.data[:n])


def test_what_coding_makes_larger_and_what_is_empty() -> None:
    noise = np.random.default_rng(1).integers(-127, 129, (4, 50)).astype(np.int32)
    empty = Part(torch.empty(0, dtype=torch.uint8, device=DEVICE), 255)
    large, none = KERNELS.encode([part_of(noise, 256), empty], [noise.shape, (1, 0)])
    assert int(large.nbytes) == large.data[:200].numel() == 200
    assert int(none.nbytes) == 0
    codes, ok = KERNELS.decode([none.data], [empty], [(1, 0)])
    assert codes[0].numel() == 0
    assert ok.tolist() == [1]


def test_more_codes_than_the_lanes_may_code_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rans_device, "MAX_STEPS", 1)
    q = np.zeros((2, 1024), np.int32)
    (encoded,) = KERNELS.encode([part_of(q, 255)], [q.shape])
    assert int(encoded.nbytes) == q.size


def own_tables() -> TableSet:
    """Tables in which more symbols begin within 16 slots than an entry can say."""
    seen = np.zeros((63, 17))
    seen[:, 0] = 1e9
    return tables_of(seen)


def test_a_models_own_tables() -> None:
    tables = own_tables()
    kernels = Kernels(tables, DEVICE)
    assert not kernels._decoding.narrow
    q = drawn((16, 48), 0.5, 255)
    part = part_of(q, 255)
    (encoded,) = kernels.encode([part], [q.shape])
    blob = encoded.data[: int(encoded.nbytes)]
    assert np.array_equal(Reader([blob.cpu().numpy()], [q.shape], tables).parts()[0], q)
    for data in (blob, on_device(pack([q], tables)[0])):
        (codes,), ok = kernels.decode([data], [part], [q.shape])
        assert ok.tolist() == [1]
        assert torch.equal(codes, part.codes)


def damaged(data: bytes, seed: int) -> bytes:
    """One to three bytes changed, or cut short."""
    draw, out = np.random.default_rng(seed), bytearray(data)
    for _ in range(int(draw.integers(1, 4))):
        out[int(draw.integers(0, len(out)))] = int(draw.integers(0, 256))
    return bytes(out[: int(draw.integers(0, len(out)))] if seed % 3 == 0 else out)


def judged(data: bytes, shape: tuple[int, int], alphabet: int) -> Codes | None:
    """The codes by the CPU, or None."""
    try:
        q = Reader([np.frombuffer(data, np.uint8)], [shape]).parts()[0] + (alphabet - 1) // 2
    except FrameError:
        return None
    return q if q.min() >= 0 and q.max() < alphabet else None


@pytest.mark.parametrize("seed", range(SEEDS))
def test_damaged_blobs_are_judged_as_on_the_cpu_and_harm_no_other(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    with_lanes(monkeypatch, 5, True)
    scale, alphabet = [(9.0, 255), (0.5, 3), (3000.0, 32767)][seed % 3]
    q = drawn((24, 40), scale, alphabet)
    part, good = part_of(q, alphabet), pack([q])[0]
    bad = damaged(good, seed)
    blobs = [on_device(b) if b else torch.empty(0, dtype=torch.uint8, device=DEVICE) for b in (good, bad, good)]
    codes, ok = KERNELS.decode(blobs, [part] * 3, [q.shape] * 3)
    want = judged(bad, q.shape, alphabet)
    assert ok.tolist() == [1, int(want is not None), 1]
    assert torch.equal(codes[0], part.codes)
    assert torch.equal(codes[2], part.codes)
    if want is not None:
        assert np.array_equal(codes[1].cpu().numpy(), want.reshape(-1))


SPEC = KVSpec("test", (LayerGroup(0, (0,), (PlaneSpec("k", 1, (PlanePart("k", 64),), DType.BF16),)),))


def test_the_codec_leaves_sizes_and_flags_on_the_device() -> None:
    codec = Rans(Rans.Config()).bind(Region(0, "k", (0,), (0,), 0, 256), SPEC, torch.device(DEVICE.type), NONE)
    codec._kernels = KERNELS  # a CPU has none of its own
    part = part_of(drawn((24, 64), 4.0, 255), 255)
    (encoded,) = codec.encode([part])
    assert encoded.nbytes.device.type == encoded.data.device.type == DEVICE.type
    blob = encoded.data[: int(encoded.nbytes)].clone()
    bad = blob.clone()
    bad[1] = 64
    codes = codec.decode([Encoded(b, torch.tensor(b.numel())) for b in (blob, bad)], [part, part])
    assert codec.ok is not None
    assert codec.ok.tolist() == [1, 0]
    assert torch.equal(codes[0], part.codes)
    with pytest.raises(FrameError, match="without codes"):
        codec.decode([Encoded(blob, torch.tensor(blob.numel()))], [Part(part.codes[:0], 255)])
