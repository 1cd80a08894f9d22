"""Demands on codecs: round trip, bound, batches, memory, and bytes that are not what they were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvserve_core.errors import FrameError
from kvserve_core.spec import DType
from kvserve_core.stages import Codec
from kvserve_core.tensor import Encoded, Part
from kvserve_core.testing.check import check
from kvserve_core.testing.data import (
    ALPHABETS,
    LENGTHS,
    any_bits,
    codes,
    exactly,
    generator,
    model,
    padded,
    peaked,
    place,
    same_bits,
    shell,
)
from kvserve_core.testing.subject import Subject, decoded, require

FLIPS = 48
TOO_MANY = "which bound() says cannot have so many; raise FrameError"


def bound_codec(subject: Subject) -> Codec:
    """The codec as one chain uses it."""
    codec: Codec = subject.bound(subject.model or model(), place(256))
    return codec


def streams(subject: Subject) -> list[Part]:
    """Every length and alphabet that it says it takes, and streams of several rows as quantizers give them."""
    top = subject.caps.max_alphabet
    plain = [codes(n, a) for a in ALPHABETS if a <= top for n in LENGTHS]
    rows = [peaked(r * 96, a, seed=r, rows=r) for a in (2, 12, 16, 255, 256, 4096) if a <= top for r in (1, 12, 64)]
    same = [replace(p, codes=torch.full_like(p.codes, p.alphabet - 1)) for p in rows]
    edge = [replace(p, codes=torch.zeros_like(p.codes)) for p in rows]
    return [replace(p, codes=p.codes.to(subject.device)) for p in (*plain, *rows, *same, *edge)]


def said(part: Part) -> str:
    """A stream in words."""
    return f"{part.codes.numel()} codes of alphabet {part.alphabet} in {part.rows} rows"


def check_blobs(codec: Codec, parts: Sequence[Part], blobs: Sequence[Encoded]) -> None:
    """One blob a part, within the bound and its own capacity, with the dtypes of the contract.

    Raises:
        CheckFailed: one is not.
    """
    require(len(blobs) == len(parts), f"{len(parts)} parts gave {len(blobs)} blobs")
    for part, e in zip(parts, blobs, strict=True):
        size, bound = int(e.nbytes), codec.bound(part)
        require(size <= bound, f"{said(part)} took {size} bytes, bound() says {bound}")
        require(size <= e.data.numel(), f"nbytes is {size}, data holds {e.data.numel()} ({said(part)})")
        require(e.data.dtype == torch.uint8 and e.data.dim() == 1, f"data is {e.data.dtype}, {e.data.dim()}-D")
        require(e.nbytes.dtype == torch.int64 and e.nbytes.dim() == 0, "nbytes is not a 0-d int64")


def check_decodes(codec: Codec, parts: Sequence[Part], blobs: Sequence[Encoded], what: str) -> None:
    """``blobs`` decode to the codes of ``parts``.

    Raises:
        CheckFailed: one does not.
    """
    for part, back in zip(parts, decoded(codec, blobs, [shell(p) for p in parts]), strict=True):
        require(same_bits(back, part.codes), f"{said(part)} came back as other codes from {what}")


@check("codec")
def round_trip(subject: Subject) -> None:
    """One batch of every length, alphabet and number of rows comes back, each within bound()."""
    codec, parts = bound_codec(subject), streams(subject)
    kept = [p.codes.clone() for p in parts]
    blobs = codec.encode(parts)
    check_blobs(codec, parts, blobs)
    require(all(map(same_bits, kept, [p.codes for p in parts])), "encode changed its input")
    check_decodes(codec, parts, [exactly(e) for e in blobs], "a batch")
    require(list(codec.encode([])) == [] and list(codec.decode([], [])) == [], "an empty batch is not empty")


@check("codec")
def alone_and_together(subject: Subject) -> None:
    """A stream's bytes do not depend on the batch it is in, on the instance, or on calls before."""
    codec, parts = bound_codec(subject), streams(subject)[::7]
    together = [exactly(e) for e in codec.encode(parts)]
    for other in (codec, bound_codec(subject)):
        for part, e in zip(reversed(parts), reversed(together), strict=True):
            alone = exactly(other.encode([part])[0])
            require(same_bits(alone.data, e.data), f"{said(part)} gave other bytes alone")


@check("codec")
def outputs_belong_to_the_caller(subject: Subject) -> None:
    """A second encode leaves the bytes of the first as they are."""
    codec, parts = bound_codec(subject), streams(subject)[5::7]
    first = codec.encode(parts)
    kept = [exactly(e).data for e in first]
    codec.encode([replace(p, codes=p.codes.flip(0)) for p in parts])
    require(all(map(same_bits, kept, [exactly(e).data for e in first])), "the bytes changed under the caller")
    back = decoded(codec, [exactly(e) for e in first], [shell(p) for p in parts])
    copies = [b.clone() for b in back]
    decoded(codec, [exactly(e) for e in reversed(first)], [shell(p) for p in reversed(parts)])
    require(all(map(same_bits, copies, back)), "decoded codes changed under the caller")


@check("codec")
def any_buffer(subject: Subject) -> None:
    """Blobs with spare room or at an odd address decode, and so do codes that begin inside a buffer."""
    codec, parts = bound_codec(subject), streams(subject)[::3]
    blobs = codec.encode(parts)
    check_decodes(codec, parts, [padded(e) for e in blobs], "a buffer with spare room")
    check_decodes(codec, parts, [padded(e, misaligned=True) for e in blobs], "an odd address")
    inside = [replace(p, codes=torch.cat((p.codes[:1], p.codes))[min(1, p.codes.numel()) :]) for p in parts]
    for part, a, b in zip(parts, blobs, codec.encode(inside), strict=True):
        require(same_bits(exactly(a).data, exactly(b).data), f"{said(part)} inside a buffer gave other bytes")


def corrupted(data: Tensor, seed: int) -> Iterator[Tensor]:
    """Flipped bits, cuts, appended bytes and noise."""
    n, draw = data.numel(), generator(seed)
    for _ in range(FLIPS if n else 0):
        changed, at = data.clone(), int(torch.randint(0, n, (), generator=draw))
        changed[at] ^= 1 << int(torch.randint(0, 8, (), generator=draw))
        yield changed
    yield from (data[:keep] for keep in sorted({0, 1, n // 2, n - 1}) if 0 <= keep < n)
    yield torch.cat((data, data.new_zeros(1)))
    yield any_bits(DType.U8, (max(n, 8),), seed).to(data.device)


def survives(codec: Codec, data: Tensor, part: Part) -> bool:
    """Whether ``data`` decodes, to codes of the right number and dtype; False for a FrameError.

    Raises:
        CheckFailed: it gives another error, or another length.
    """
    try:
        back = decoded(codec, [Encoded(data, torch.tensor(data.numel()))], [shell(part)])
    except FrameError:
        return False
    except Exception as error:
        require(False, f"corrupt bytes of {said(part)} raised {type(error).__name__}: {error}; raise FrameError")
    else:
        good = back[0].numel() == part.codes.numel() and back[0].dtype == part.codes.dtype
        require(good, f"corrupt bytes of {said(part)} decoded to {back[0].numel()} codes of {back[0].dtype}")
    return True


@check("codec")
def corruption(subject: Subject) -> None:
    """Flipped bits, cut and foreign bytes give a FrameError or as many codes as expected, nothing else."""
    codec = bound_codec(subject)
    parts = [p for p in streams(subject) if p.codes.numel() in (7, 1000, 12 * 96)][::5]
    for i, (part, e) in enumerate(zip(parts, codec.encode(parts), strict=True)):
        for data in corrupted(exactly(e).data, i):
            survives(codec, data, part)


@check("codec")
def another_length(subject: Subject) -> None:
    """A whole blob of other codes: a FrameError where it is beyond bound(), else that or as many codes as expected."""
    codec = bound_codec(subject)
    for part in (p for p in streams(subject) if p.codes.numel() == 1000):
        blob = exactly(codec.encode([part])[0]).data
        for count in (0, 999, 1001, 4000):
            other = replace(part, codes=part.codes.new_zeros(count))
            passed_off = survives(codec, blob, other) and blob.numel() > codec.bound(other)
            require(not passed_off, f"{blob.numel()} bytes of {said(part)} were taken for {said(other)}, {TOO_MANY}")
