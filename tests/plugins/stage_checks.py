"""Checks that any stage must pass, written against its declared capabilities and not against its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from kvserve_core.artefacts import NONE, Artefacts
from kvserve_core.component import ComponentConfig
from kvserve_core.spec import DType, KVSpec, LayerGroup, PlanePart, PlaneSpec, Region
from kvserve_core.stages import Codec, Quantizer, Stage, Transform
from kvserve_core.tensor import TORCH, Encoded, Part, Quantized

CPU = torch.device("cpu")
DIMS = (32, 64, 80, 96, 128, 256, 576)
TOKENS = (0, 1, 17, 255, 256)
FLOATS = (DType.BF16, DType.F16, DType.F32)
LAYERS, HEADS = 3, 4
KINDS = ("normal", "zeros", "constant", "large", "outlier", "tiny")
StageT = TypeVar("StageT", bound=Stage)
LENGTHS = (0, 1, 2, 7, 16, 1000)
ALPHABETS = (1, 2, 3, 5, 6, 7, 8, 12, 16, 17, 100, 255, 256, 257, 1000, 32768)


def model(dtype: DType = DType.BF16, dim: int = 64, plane: str = "k") -> KVSpec:
    """A small model with one plane."""
    spec = PlaneSpec(plane, HEADS, (PlanePart(plane, dim),), dtype)
    return KVSpec("checks", (LayerGroup(0, tuple(range(LAYERS)), (spec,)),))


def place(
    tokens: int, layers: tuple[int, ...] = (0, 1, 2), heads: tuple[int, ...] = (0, 1, 2, 3), plane: str = "k"
) -> Region:
    return Region(0, plane, layers, heads, 512, 512 + tokens)


def values(kind: str, dtype: DType, tokens: int, dim: int, seed: int = 0) -> Tensor:
    """``[LAYERS, HEADS, tokens, dim]`` of one kind of data."""
    x = torch.randn((LAYERS, HEADS, tokens, dim), generator=torch.Generator().manual_seed(seed))
    if kind == "zeros":
        x = torch.zeros_like(x)
    elif kind == "constant":
        x = torch.full_like(x, -3.140625)
    elif kind == "large":
        x = x * (1e5 if dtype != DType.F16 else 1e4)
    elif kind == "outlier":
        x[:, 1, :, : dim // 8] *= 1000
    elif kind == "tiny":
        x = x * 1e-7
    return x.to(TORCH[dtype])


def any_bits(dtype: DType, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Random bit patterns: NaNs with payloads, infinities, subnormals, both zeros."""
    data = torch.randint(
        0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=torch.Generator().manual_seed(seed)
    )
    return data.to(torch.uint8).view(TORCH[dtype])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bits, NaN included."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    )


def scattered(x: Tensor) -> Tensor:
    """The same values in a view that is not contiguous: ``[T, H, L, D]`` memory with gaps between rows."""
    wide = torch.zeros((*(x.shape[i] for i in (2, 1, 0)), x.shape[3] + 5), dtype=x.dtype)
    view = wide.permute(2, 1, 0, 3)[..., 2:-3]
    view.copy_(x)
    return view


def bind(stage: StageT, spec: KVSpec, at: Region, artefacts: Artefacts = NONE) -> StageT:
    return stage.bind(at, spec, CPU, artefacts)


def quantizer_sees(stage: Quantizer, dtype: DType) -> list[DType]:
    """Dtypes of a plane's tensor in front of this quantizer: native, and f32 behind a lossy transform if lossy."""
    return [dtype] if stage.caps.exact or dtype == DType.F32 else [dtype, DType.F32]


def cases(stage: Stage) -> Iterator[tuple[str, DType, int, int]]:
    """Kind, plane dtype, tokens and dim: every value of each axis once, not every combination."""
    dtypes = [d for d in FLOATS if d in stage.caps.dtypes]
    for dtype in dtypes:
        yield from ((kind, dtype, 17, 64) for kind in KINDS)
    yield from (("normal", dtypes[0], 17, dim) for dim in DIMS)
    yield from (("outlier", dtypes[0], tokens, 64) for tokens in TOKENS)


def copies_of(q: Quantized) -> list[Tensor]:
    return [p.codes.clone() for p in q.parts] + [v.clone() for v in q.params.values()]


def assert_same_quantized(a: Quantized, b: Quantized) -> None:
    assert a.shape == b.shape
    assert [(p.alphabet, p.rows, p.table) for p in a.parts] == [(p.alphabet, p.rows, p.table) for p in b.parts]
    assert a.params.keys() == b.params.keys()
    assert all(map(same_bits, copies_of(a), copies_of(b)))


def check_transform(make: Callable[[], Transform], tolerance: float = 2e-6) -> None:
    """Round trip, shapes, dtypes, untouched and scattered input; ``tolerance`` is relative to a row's norm."""
    for kind, dtype, tokens, dim in cases(make()):
        x, at = values(kind, dtype, tokens, dim), place(tokens)
        stage, before = bind(make(), model(dtype, dim), at), x.clone()
        y, params = stage.encode(x, at)
        assert tuple(y.shape) == stage.shape(tuple(x.shape))
        assert y.dtype == (x.dtype if stage.caps.exact else torch.float32)
        kept = y.clone()
        back = stage.decode(y, params, at)
        assert same_bits(x, before)
        assert same_bits(y, kept)
        assert back.shape == x.shape
        if stage.caps.exact:
            assert same_bits(back, x)
        else:
            error = (back - x.float()).norm(dim=-1)
            assert (error <= tolerance * x.float().norm(dim=-1)).all(), (kind, dtype, tokens, dim)
        again, _ = stage.encode(scattered(x), at)
        assert same_bits(again, y)


def check_quantizer(
    make: Callable[[], Quantizer], bound: Callable[[Tensor, Quantized, Tensor], Tensor] | None = None
) -> None:
    """Round trip (bit for bit if exact, else ``|x - x'| <= bound(x, q, x')``), valid streams, untouched input."""
    for kind, dtype, tokens, dim in cases(make()):
        for seen in quantizer_sees(make(), dtype):
            x, at = values(kind, dtype, tokens, dim).to(TORCH[seen]), place(tokens)
            stage, before = bind(make(), model(dtype, dim), at), x.clone()
            q = stage.encode(x, at)
            check_streams(stage, q, x)
            kept = copies_of(q)
            back = stage.decode(q, at)
            assert same_bits(x, before)
            assert all(map(same_bits, kept, copies_of(q)))
            assert back.shape == x.shape
            if stage.caps.exact:
                assert same_bits(back, x)
            else:
                assert back.isfinite().all()
                limit = (bound or _magnitude)(x.float(), q, back.float())
                assert ((back - x.float()).abs() <= limit).all(), (kind, dtype, seen, tokens, dim)
            assert_same_quantized(stage.encode(scattered(x), at), q)


def _magnitude(x: Tensor, _q: Quantized, _back: Tensor) -> Tensor:
    """The least that any quantizer owes: no value further off than the spread of its head."""
    return x.abs().amax((2, 3), keepdim=True) * 2 if x.numel() else x


def check_streams(stage: Quantizer, q: Quantized, x: Tensor) -> None:
    assert q.shape == tuple(x.shape)
    for part in q.parts:
        assert part.codes.dim() == 1
        assert part.codes.is_contiguous()
        assert part.codes.dtype in (torch.uint8, torch.int16)
        assert part.alphabet <= stage.caps.max_alphabet
        assert part.codes.numel() % part.rows == 0
        if part.codes.numel():
            assert int(part.codes.min()) >= 0
            assert int(part.codes.max()) < part.alphabet
    assert all(v.dtype in TORCH.values() for v in q.params.values())


def check_exact_bits(make: Callable[[], Quantizer]) -> None:
    """An exact quantizer keeps every bit pattern."""
    for dtype in sorted(make().caps.dtypes):
        x, at = any_bits(dtype, (LAYERS, HEADS, 17, 64)), place(17)
        stage = bind(make(), model(dtype), at)
        assert same_bits(stage.decode(stage.encode(x, at), at), x)


def check_head_slices(make: Callable[[], Transform | Quantizer], artefacts: Artefacts = NONE) -> None:
    """A head-local stage gives a slice of heads and layers the same bits as the whole."""
    stage = make()
    assert stage.caps.head_local
    for tokens in (1, 17, 256):
        x, at = values("outlier", DType.BF16, tokens, 96), place(tokens)
        whole = _through(bind(make(), model(dim=96), at, artefacts), x, at)
        for layers, heads in (((0, 1, 2), (1,)), ((1,), (2, 3)), ((0, 2), (0, 1, 3))):
            part = replace(at, layers=layers, heads=heads)
            sliced = x[list(layers)][:, list(heads)]
            got = _through(bind(make(), model(dim=96), part, artefacts), sliced, part)
            assert same_bits(got, whole[list(layers)][:, list(heads)]), (tokens, layers, heads)


def _through(stage: Transform | Quantizer, x: Tensor, at: Region) -> Tensor:
    if isinstance(stage, Transform):
        return stage.encode(x, at)[0]
    return stage.decode(stage.encode(x, at), at)


def check_deterministic(make: Callable[[], Transform | Quantizer]) -> None:
    """Two instances give the same bits."""
    x, at = values("normal", DType.BF16, 256, 128), place(256)
    a, b = (bind(make(), model(dim=128), at) for _ in range(2))
    assert same_bits(_through(a, x, at), _through(b, x, at))
    if isinstance(a, Quantizer) and isinstance(b, Quantizer):
        assert_same_quantized(a.encode(x, at), b.encode(x, at))


def check_config(stage: Stage) -> None:
    """The configuration survives JSON, is frozen, refuses unknown fields, and is of the class's own ``Config``."""
    config = stage.config
    assert type(config) is type(stage).Config
    assert type(config).model_validate_json(config.model_dump_json()) == config
    with pytest.raises(ValueError, match="no_such_field"):
        type(config).model_validate({**config.model_dump(), "no_such_field": 1})
    with pytest.raises(ValueError, match="frozen"):
        config.no_such_field = 1
    assert isinstance(config, ComponentConfig)
    assert stage.format_version in stage.reads


def codes(length: int, alphabet: int, seed: int = 0) -> Part:
    dtype = torch.uint8 if alphabet <= 256 else torch.int16
    made = torch.randint(0, alphabet, (length,), generator=torch.Generator().manual_seed(seed))
    return Part(made.to(dtype), alphabet)


def shell(part: Part) -> Part:
    """What decode is told of a part: everything but the codes."""
    return replace(part, codes=torch.empty(part.codes.numel(), dtype=part.codes.dtype, device="meta"))


def padded(e: Encoded, misaligned: bool = False) -> Encoded:
    """The same blob with spare capacity, at an odd address if asked."""
    n, shift = int(e.nbytes), int(misaligned)
    room = torch.full((n + 9 + shift,), 0xA5, dtype=torch.uint8)
    room[shift : shift + n] = e.data[:n]
    return Encoded(room[shift:], e.nbytes)


def check_codec(codec: Codec) -> None:
    """Batched round trip of every length and alphabet, within ``bound``, from padded and misaligned buffers."""
    stage = bind(codec, model(), place(256))
    parts = [codes(n, a) for a in ALPHABETS if a <= codec.caps.max_alphabet for n in LENGTHS]
    kept = [p.codes.clone() for p in parts]
    blobs = stage.encode(parts)
    assert len(blobs) == len(parts)
    assert all(map(same_bits, kept, [p.codes for p in parts]))
    for part, e in zip(parts, blobs, strict=True):
        assert int(e.nbytes) <= min(stage.bound(part), e.data.numel())
        assert e.nbytes.shape == ()
        assert (e.data.dtype, e.nbytes.dtype) == (torch.uint8, torch.int64)
    for given in (blobs, [padded(e) for e in blobs], [padded(e, misaligned=True) for e in blobs]):
        back = stage.decode(given, [shell(p) for p in parts])
        assert all(map(same_bits, back, kept))
    assert list(stage.encode([])) == []
    assert list(stage.decode([], [])) == []
