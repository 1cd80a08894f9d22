from __future__ import annotations

import threading

import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve_core.errors import FrameError
from kvserve_core.stages import Codec
from kvserve_core.tensor import Part
from kvserve_plugins.codecs.bitpack import Bitpack
from kvserve_plugins.codecs.raw import Raw
from kvserve_plugins.codecs.zstd import Zstd
from kvserve_plugins.kernels.blobs import blob_of
from plugins.stage_checks import bind, check_codec, check_config, codes, model, place, same_bits, shell


def raw() -> Raw:
    return Raw(Raw.Config())


def bitpack() -> Bitpack:
    return Bitpack(Bitpack.Config())


def zstd(level: int | None = None) -> Zstd:
    return bind(Zstd(Zstd.Config(level=level)), model(), place(256))


CODECS = [raw, bitpack, zstd]


def gaussian(levels: int, count: int, dtype: torch.dtype = torch.uint8) -> Part:
    x = torch.randn(count, generator=torch.Generator().manual_seed(5)) * levels / 7 + levels / 2
    return Part(x.round().clamp(0, levels - 1).to(dtype), levels)


def entropy_bits(part: Part) -> float:
    p = torch.bincount(part.codes.to(torch.int64)).double() / part.codes.numel()
    return -float((p[p > 0] * p[p > 0].log2()).sum())


@pytest.mark.parametrize("make", CODECS)
def test_round_trip_and_configuration(make: type[Codec]) -> None:
    check_codec(make())
    check_config(make())


@pytest.mark.parametrize("level", [-5, 1, 3, 19])
def test_zstd_levels(level: int) -> None:
    part = gaussian(16, 5000)
    codec = zstd(level)
    assert same_bits(codec.decode(codec.encode([part]), [shell(part)])[0], part.codes)


@pytest.mark.parametrize("level", [-6, 20])
def test_zstd_levels_out_of_range(level: int) -> None:
    with pytest.raises(ValueError, match=str(level + (1 if level < 0 else -1))):
        Zstd.Config(level=level)


@pytest.mark.parametrize("levels", [6, 12, 16, 64])
def test_zstd_default_is_near_the_entropy_of_codes_and_below_level_3(levels: int) -> None:
    part = gaussian(levels, 32768)
    coded = 8 * int(zstd().encode([part])[0].nbytes) / 32768
    assert coded < entropy_bits(part) * (
        1.05 if levels > 6 else 1.15
    )  # whole bits a code cost most where codes are few
    assert coded <= 8 * int(zstd(3).encode([part])[0].nbytes) / 32768


def test_zstd_splits_bytes_of_wide_codes() -> None:
    part = gaussian(512, 16384, torch.int16)
    interleaved = Part(part.codes.view(torch.uint8), 256)
    assert int(zstd().encode([part])[0].nbytes) < 0.95 * int(zstd().encode([interleaved])[0].nbytes)


def test_zstd_frames_are_plain_zstd() -> None:
    part = codes(1000, 16)
    frame = bytes(zstd().encode([part])[0].data.tolist())
    assert zstandard.decompress(frame) == bytes(part.codes.tolist())


def test_bitpack_sizes() -> None:
    for alphabet, count, nbytes in ((6, 3000, 1000), (12, 11000, 5000), (16, 1000, 500), (16, 1001, 501), (1, 50, 0)):
        part = codes(count, alphabet)
        assert int(bitpack().encode([part])[0].nbytes) == nbytes == bitpack().bound(part)


def test_bitpack_refuses_codes_outside_the_alphabet_and_padding() -> None:
    part = codes(4, 6)  # two groups of three digits, the last two of them padding
    good = bitpack().encode([part])[0].data
    for bad in (torch.tensor([216, 0]), torch.tensor([0, 36]), torch.tensor([255, 255])):
        with pytest.raises(FrameError, match="outside an alphabet of 6"):
            bitpack().decode([blob_of(bytes(bad.tolist()))], [shell(part)])
    assert same_bits(bitpack().decode([blob_of(bytes(good.tolist()))], [shell(part)])[0], part.codes)


def test_bitpack_flags_each_blob_of_a_batch() -> None:
    codec, part = bitpack(), codes(3, 6)
    good, bad = codec.encode([part])[0], blob_of(b"\xff")
    with pytest.raises(FrameError):
        codec.decode([good, bad, good], [shell(part)] * 3)
    assert codec.ok is not None
    assert codec.ok.tolist() == [True, False, True]


@pytest.mark.parametrize("make", CODECS)
@pytest.mark.parametrize("change", [-1, 1])
def test_another_length_is_a_frame_error(make: type[Codec], change: int) -> None:
    codec, part = make(), codes(1000, 16)
    encoded = bytes(codec.encode([part])[0].data.tolist())
    wrong = encoded[:change] if change < 0 else encoded + b"\0"
    with pytest.raises(FrameError):
        codec.decode([blob_of(wrong)], [shell(part)])
    longer = Part(torch.zeros(1000 + 32 * change, dtype=torch.uint8), 16)
    with pytest.raises(FrameError, match="expected"):
        codec.decode([blob_of(encoded)], [shell(longer)])


def test_zstd_bomb_is_refused_by_its_header() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(2**26))
    with pytest.raises(FrameError, match="67108864 bytes, expected 1000"):
        zstd().decode([blob_of(bomb)], [shell(codes(1000, 16))])


def test_zstd_frame_that_hides_its_size_is_refused() -> None:
    hidden = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000))
    with pytest.raises(FrameError, match="expected 1000"):
        zstd().decode([blob_of(hidden)], [shell(codes(1000, 16))])


def test_zstd_frame_that_lies_about_its_size_is_refused() -> None:
    frame = bytearray(zstandard.ZstdCompressor().compress(bytes(range(200))))
    assert zstandard.frame_content_size(bytes(frame)) == 200
    frame[5] = 100  # the content size of a single-segment frame this small
    assert zstandard.frame_content_size(bytes(frame)) == 100
    with pytest.raises(FrameError, match="'zstd' cannot read"):
        zstd().decode([blob_of(bytes(frame))], [shell(codes(100, 256))])


@given(st.binary(max_size=80), st.integers(0, 60))
@settings(max_examples=200, deadline=None)
def test_zstd_of_any_bytes_is_a_frame_error_or_the_right_length(data: bytes, count: int) -> None:
    try:
        decoded = ZSTD.decode([blob_of(data)], [shell(codes(count, 16))])
    except FrameError:
        return
    assert decoded[0].numel() == count


ZSTD = zstd()


@given(st.integers(0, 7), st.data())
@settings(max_examples=150, deadline=None)
def test_zstd_with_a_flipped_bit_never_gives_another_length(bit: int, data: st.DataObject) -> None:
    part = codes(300, 12)
    frame = bytearray(ZSTD.encode([part])[0].data.tolist())
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= 1 << bit
    try:
        decoded = ZSTD.decode([blob_of(bytes(frame))], [shell(part)])
    except FrameError:
        return
    assert decoded[0].numel() == 300


def test_one_zstd_codec_serves_many_threads() -> None:
    parts = [gaussian(16, 20000 + i) for i in range(8)]
    failures: list[object] = []

    def work(part: Part) -> None:
        try:
            for _ in range(30):
                if not same_bits(ZSTD.decode(ZSTD.encode([part]), [shell(part)])[0], part.codes):
                    failures.append(part)
        except FrameError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
