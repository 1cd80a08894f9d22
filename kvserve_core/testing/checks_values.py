"""Demands on transforms and quantizers: round trip, sizes, values, memory and repetition."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from kvserve_core.errors import UnsupportedSpecError
from kvserve_core.spec import DType
from kvserve_core.stages import Quantizer, Transform
from kvserve_core.tensor import TORCH, Params, Quantized
from kvserve_core.testing.cases import Case, by_dim, by_plane, by_tokens, by_value, case
from kvserve_core.testing.check import VALUES, check
from kvserve_core.testing.data import any_bits, same_bits, scattered
from kvserve_core.testing.subject import Subject, may_refuse, require

PARAMS = (torch.uint8, torch.int16, torch.int32, torch.bfloat16, torch.float32)


def exact(subject: Subject) -> bool:
    """Whether it must keep every bit."""
    return subject.caps.exact


def quantized(q: Quantized) -> list[Tensor]:
    """All tensors of a quantizer's output, copied."""
    return [p.codes.clone() for p in q.parts] + [v.clone() for v in q.params.values()]


def same_quantized(a: Quantized, b: Quantized) -> bool:
    """Equal streams and parameters, bit for bit."""
    said = [[(p.alphabet, p.rows, p.table, p.codes.numel()) for p in q.parts] for q in (a, b)]
    return (
        a.shape == b.shape
        and said[0] == said[1]
        and list(a.params) == list(b.params)
        and all(map(same_bits, quantized(a), quantized(b)))
    )


def encoded(stage: Transform | Quantizer, c: Case, x: Tensor) -> tuple[list[Tensor], Callable[[], Tensor]]:
    """What ``encode`` gives, as a list of its live tensors, and a call that decodes it."""
    if isinstance(stage, Transform):
        y, params = stage.encode(x, c.at)
        _check_transformed(stage, c, x, y, params)
        return [y, *params.values()], lambda: stage.decode(y, params, c.at)
    q = stage.encode(x, c.at)
    check_streams(stage, q, x)
    return [*(p.codes for p in q.parts), *q.params.values()], lambda: stage.decode(q, c.at)


def _check_transformed(stage: Transform, c: Case, x: Tensor, y: Tensor, params: Params) -> None:
    told = stage.shape((x.shape[0], x.shape[1], x.shape[2], x.shape[3]))
    require(tuple(y.shape) == told, f"encode gave {list(y.shape)}, shape() says {list(told)} ({c})")
    due = x.dtype if stage.caps.exact else torch.float32
    require(y.dtype == due, f"encode gave {y.dtype}, expected {due} ({c})")
    _check_params(params)


def _check_params(params: Params) -> None:
    for name, value in params.items():
        require(value.dtype in PARAMS, f"parameter {name!r} is {value.dtype}; only {list(map(str, PARAMS))} travel")


def check_streams(stage: Quantizer, q: Quantized, x: Tensor) -> None:
    """Streams that a codec may be given: 1-D, contiguous, u8 or i16, within their alphabet, whole rows.

    Raises:
        CheckFailed: one is not.
    """
    require(q.shape == tuple(x.shape), f"shape is {q.shape}, the input was {tuple(x.shape)}")
    for i, part in enumerate(q.parts):
        codes, where = part.codes, f"stream {i}"
        require(codes.dim() == 1 and codes.is_contiguous(), f"{where} is not 1-D and contiguous")
        require(codes.dtype in (torch.uint8, torch.int16), f"{where} is {codes.dtype}, not uint8 or int16")
        top = stage.caps.max_alphabet
        require(part.alphabet <= top, f"{where} has alphabet {part.alphabet}, caps.max_alphabet is {top}")
        require(codes.numel() % part.rows == 0, f"{where}: {codes.numel()} codes are not {part.rows} equal rows")
        if codes.numel():
            low, high = int(codes.min()), int(codes.max())
            require(low >= 0 and high < part.alphabet, f"{where} has codes {low}..{high}, alphabet {part.alphabet}")
    _check_params(q.params)


def within_bound(subject: Subject, c: Case, back: Tensor, rounding: float = 0.0) -> None:
    """Bit-exact where exact, else within ``max_error``, else finite and no further off than zeros would be.

    rounding: the part of a value by which ``max_error`` may be exceeded, where values were rounded to their plane's
    dtype.

    Raises:
        CheckFailed: it is not.
    """
    require(back.shape == c.x.shape, f"decoded to {list(back.shape)} ({c})")
    if subject.caps.exact:
        require(same_bits(back, c.x), f"declared exact, but decoded to other bits ({c})")
        return
    require(back.isfinite().all(), f"decoded to NaN or Inf ({c})")
    x, got = c.x.double(), back.double()
    limit = subject.max_error(c.x.float(), subject.config)
    if limit is None and subject.sample and c.kind != "normal":
        return  # a calibrated component promises nothing for what it was not calibrated on
    if limit is None:
        error, energy = float((got - x).square().sum()), float(x.square().sum())
        require(error <= energy, f"squared error {error:.4g} above the energy {energy:.4g} of the values ({c})")
    else:
        excess = (got - x).abs() - torch.as_tensor(limit, device=x.device) - rounding * got.abs()
        worst = float(excess.max()) if excess.numel() else 0.0
        require(worst <= 0, f"an error is {worst:.4g} above max_error ({c})")


def round_trip(subject: Subject, c: Case) -> None:
    """Encode and decode one input; neither may change what it was given, nor need it contiguous.

    Raises:
        CheckFailed: a demand is not met.
    """
    stage, before = subject.bound(c.kv, c.at), c.x.clone()
    try:
        outputs, decode = encoded(stage, c, c.x)
    except may_refuse(c.kind, subject):
        return
    kept = [t.clone() for t in outputs]
    back = decode()
    require(same_bits(c.x, before), f"encode or decode changed its input ({c})")
    require(all(map(same_bits, kept, outputs)), f"decode changed what encode gave ({c})")
    within_bound(subject, c, back)
    again, _ = encoded(stage, c, scattered(c.x))
    require(all(map(same_bits, kept, again)), f"a view that is not contiguous gave other bits ({c})")


def _all(subject: Subject, made: Iterable[Case]) -> None:
    for c in made:
        round_trip(subject, c)


@check(*VALUES)
def kinds_of_values(subject: Subject) -> None:
    """Round trip of normal, all-zero, constant, 1e5, outlier and tiny values in every dtype."""
    _all(subject, by_value(subject))


@check(*VALUES)
def head_dims(subject: Subject) -> None:
    """Round trip of head dims from 32 to 576."""
    _all(subject, by_dim(subject))


@check(*VALUES)
def token_counts(subject: Subject) -> None:
    """Round trip of 0 tokens, 1, a part of a cell and a whole cell."""
    _all(subject, by_tokens(subject))


@check(*VALUES)
def supported_planes(subject: Subject) -> None:
    """Round trip on every plane that the capabilities name; under '*', on every plane that bind accepts."""
    worked = 0
    for c in by_plane(subject):
        try:
            subject.bound(c.kv, c.at)
        except UnsupportedSpecError as error:
            if subject.unplaced:
                raise
            named = "*" not in subject.caps.planes
            require(not named, f"plane {c.at.plane!r} is in caps.planes, and bind refuses it: {error}")
            continue
        round_trip(subject, c)
        worked += 1
    require(worked, "caps.planes is {'*'}, and every plane is refused")


@check(*VALUES, when=exact)
def every_bit_pattern(subject: Subject) -> None:
    """NaN payloads, infinities, subnormals and signed zeros survive an exact stage."""
    for dtype in [None] if subject.model else sorted(subject.caps.dtypes):
        c = case(subject, dtype=dtype)
        own = DType(str(c.x.dtype).removeprefix("torch."))
        round_trip(subject, c._replace(kind="any", x=any_bits(own, tuple(c.x.shape)).view(TORCH[own]).to(c.x.device)))


@check(*VALUES)
def deterministic(subject: Subject) -> None:
    """Two instances, and two calls of one, give the same bits."""
    c = case(subject, tokens=256)
    one, two = (subject.bound(c.kv, c.at) for _ in range(2))
    first = [t.clone() for t in encoded(one, c, c.x)[0]]
    for stage in (one, two):
        again, decode = encoded(stage, c, c.x)
        require(all(map(same_bits, first, again)), "encoding the same values again gave other bits")
        require(same_bits(decode(), decode()), "decoding the same bytes again gave other bits")
