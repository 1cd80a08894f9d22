"""A model's own tables for ``rans``: the file, the coder under them, the fit."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvserve_core.artefacts import NONE, Artefacts
from kvserve_core.errors import ArtefactError, UnavailableComponentError
from kvserve_core.tensor import Part
from kvserve_plugins.codecs.rans import Rans
from kvserve_plugins.kernels import rans_file, rans_fit
from kvserve_plugins.kernels.blobs import blob_of
from kvserve_plugins.kernels.rans_set import PUBLISHED, TableSet
from kvserve_plugins.quantizers.bitplane import Bitplane
from plugins import rans_reference
from plugins.rans_files import OWN_TABLES, File, even_counts, file_of
from plugins.stage_checks import CPU, model, place, same_bits, shell

Counts = NDArray[np.int16]


def part_of(q: NDArray[np.integer], alphabet: int = 255) -> Part:
    codes = torch.from_numpy(q.astype(np.int64) + (alphabet - 1) // 2).to(
        torch.uint8 if alphabet < 257 else torch.int16
    )
    return Part(codes.reshape(-1), alphabet, len(q))


def even(rows: int = 60, columns: int = 256, seed: int = 0) -> NDArray[np.int32]:
    """Codes that are hardly ever odd: no published table is like that."""
    draw = np.random.default_rng(seed)
    q = 2 * np.rint(draw.normal(size=(rows, columns)) * np.geomspace(3, 0.3, rows)[:, None])
    return (q + (draw.random((rows, columns)) < 0.01)).astype(np.int32)


def bound(tables: File | None) -> Rans:
    artefacts = Artefacts({tables.digest: tables.data}) if tables else NONE
    stage = Rans(Rans.Config(tables=tables.digest if tables else None))
    return stage.bind(place(256), model(), CPU, artefacts)


def blob(stage: Rans, part: Part) -> bytes:
    return bytes(stage.encode([part])[0].data.tolist())


@pytest.mark.parametrize("scale", [0.1, 1.0, 300.0])
def test_codes_come_back_under_a_models_own_tables(scale: float) -> None:
    draw = np.random.default_rng(1)
    q = np.rint(draw.laplace(size=(40, 64)) * np.geomspace(9, 0.3, 40)[:, None] * scale).clip(-16383, 16383)
    part, stage = part_of(q, 32767), bound(OWN_TABLES)
    data = blob(stage, part)
    assert same_bits(stage.decode([blob_of(data)], [shell(part)])[0], part.codes)
    own = [*even_counts().tolist(), *rans_reference.ALL[64:]]
    assert rans_reference.decode(data, 40, 64, 32767, own) == part.codes.tolist()


def test_the_tables_matter() -> None:
    draw = np.random.default_rng(2)
    part = part_of(2 * draw.integers(-5, 6, (60, 256)) * (draw.random((60, 256)) < 0.3))
    own, published = blob(bound(OWN_TABLES), part), blob(bound(None), part)
    assert own != published
    assert len(own) < len(published)


def test_what_a_configuration_needs() -> None:
    assert Rans(Rans.Config()).artefacts == frozenset()
    assert not Rans(Rans.Config()).caps.artefacts
    stage = Rans(Rans.Config(tables=OWN_TABLES.digest))
    assert stage.artefacts == {OWN_TABLES.digest}
    assert stage.caps.artefacts
    with pytest.raises(ArtefactError, match="is not in the loaded library"):
        stage.bind(place(256), model(), CPU, NONE)
    with pytest.raises(ValueError, match="tables"):
        Rans.Config(tables="mine")


def put(row: int, column: int, value: int) -> Callable[[Counts], None]:
    def change(counts: Counts) -> None:
        counts[row, column] = value

    return change


def gap(counts: Counts) -> None:
    counts[5, 15] += 2 * counts[5, 16]
    counts[5, 16] = counts[5, 14] = 0


def no_escape(counts: Counts) -> None:
    counts[5, 15] += counts[5, 31]
    counts[5, 31] = 0


def narrow(counts: Counts) -> None:
    counts[:63, 15] += counts[:63, 0] + counts[:63, 30]
    counts[:63, 0] = counts[:63, 30] = 0


BROKEN = {
    "must sum to 4096": put(3, 15, 1),
    "the last one at value 0": lambda counts: counts.__setitem__(63, counts[62]),
    "is not even": lambda counts: counts.__setitem__((5, slice(15, 17)), counts[5, 15:17] + np.int16([-1, 1])),
    "has a gap": gap,
    "lacks the escape": no_escape,
    "no row knows all values": narrow,
}


@pytest.mark.parametrize("what", BROKEN)
def test_tables_that_no_coder_can_use_are_refused(what: str) -> None:
    counts = even_counts()
    BROKEN[what](counts)
    with pytest.raises(ArtefactError, match=what):
        rans_file.parse(file_of(counts).data)


def test_what_is_no_file_of_tables_is_refused() -> None:
    for data in (b"", OWN_TABLES.data[:-9], file_of(even_counts(), key="kvserve.klt").data):
        with pytest.raises(ArtefactError, match="not tables of 'kvserve calibrate tables'"):
            rans_file.parse(data)
    with pytest.raises(ArtefactError, match=r"int32 \[64, 32\], not int16"):
        rans_file.parse(file_of(even_counts().astype(np.int32)).data)
    with pytest.raises(ArtefactError, match="of version 2, this kvserve reads 1"):
        rans_file.parse(file_of(even_counts(), version=2).data)


def test_fitted_tables_follow_the_codes() -> None:
    seen: list[tuple[int, int]] = []
    data = Rans.fitted(
        lambda: [part_of(even(seed=i)) for i in range(3)], {"from": "a test"}, lambda *at: seen.append(at)
    )
    assert seen == [(i, rans_fit.ROUNDS) for i in range(1, rans_fit.ROUNDS + 1)]
    part = part_of(even(seed=9))
    assert len(blob(bound(File(data)), part)) < 0.85 * len(blob(bound(None), part))
    assert b"a test" in data


def test_tables_of_nothing_are_the_published_ones() -> None:
    made = rans_fit.tables_of(np.zeros((63, 17)))
    assert np.abs(made.frequencies.astype(int) - PUBLISHED.frequencies.astype(int)).max() <= 1
    rans_file.parse(rans_file.write(made, {}))


def test_a_fit_never_makes_its_own_codes_larger() -> None:
    draw = np.random.default_rng(0)
    for rows in (1, 30):
        q = np.rint(draw.laplace(size=(rows, 16)) * np.geomspace(4, 0.5, rows)[:, None]).astype(np.int32)
        parts = [q] * rans_fit.SAMPLE
        made = rans_fit.fitted(lambda parts=parts: parts, lambda *_: None)
        assert len(rans_fit.pack([q], made)[0]) <= len(rans_fit.pack([q])[0])


def bitplane_parts(scale: float) -> list[Part]:
    stage, made = Bitplane(Bitplane.Config()).bind(place(256), model(), CPU, NONE), []
    for seed in range(7):
        x = torch.randn(3, 4, 256, 64, generator=torch.Generator().manual_seed(seed)) * scale
        made += stage.encode(x.bfloat16(), place(256)).parts
    return made


def without_zero(largest: int) -> list[Part]:
    draw = np.random.default_rng(3)
    shape = (60, 4096)
    return [part_of(draw.integers(1, largest + 1, shape) * draw.choice([-1, 1], shape)) for _ in range(7)]


@pytest.mark.parametrize("scale", [0.05, 0.01, 0.003])
def test_tables_of_bytes_that_are_no_centred_codes_can_be_read(scale: float) -> None:
    parts = bitplane_parts(scale)
    stage = bound(File(Rans.fitted(lambda: parts, {}, lambda *_: None)))
    for part in parts[:3]:
        assert same_bits(stage.decode([blob_of(blob(stage, part))], [shell(part)])[0], part.codes)


@pytest.mark.parametrize("largest", [1, 5, 7])
def test_tables_of_codes_without_zero_serve_them(largest: int) -> None:
    parts = without_zero(largest)
    stage = bound(File(Rans.fitted(lambda: parts, {}, lambda *_: None)))
    data = blob(stage, parts[0])
    assert len(data) < len(blob(bound(None), parts[0]))
    assert same_bits(stage.decode([blob_of(data)], [shell(parts[0])])[0], parts[0].codes)


@pytest.mark.parametrize("magnitude", range(17))
def test_tables_of_a_single_magnitude_can_be_read(magnitude: int) -> None:
    seen = np.zeros((63, 17))
    seen[:, magnitude] = 1e12
    made = rans_fit.tables_of(seen)
    rans_file.parse(rans_file.write(made, {}))
    assert (made.frequencies.sum(1) == 4096).all()


def test_a_header_that_is_nested_too_deep() -> None:
    header = b'{"__metadata__":' + b"[" * 100_000
    with pytest.raises(ArtefactError, match="nested too deep"):
        rans_file.parse(len(header).to_bytes(8, "little") + header)


def test_tables_that_could_not_be_read_are_not_written() -> None:
    frequencies = PUBLISHED.frequencies.copy()
    frequencies[5, 15] += 1
    with pytest.raises(ValueError, match="must sum to 4096"):
        rans_file.write(TableSet(frequencies), {})


def test_without_safetensors_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("safetensors", "safetensors.numpy"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnavailableComponentError, match=r"pip install 'kvserve\[hf\]'"):
        rans_file.parse(OWN_TABLES.data)
    with pytest.raises(UnavailableComponentError, match="'safetensors'"):
        rans_file.write(PUBLISHED, {})
