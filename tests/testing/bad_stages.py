"""Stages that each break one promise, and stand beside the check that must find it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvserve_core.component import ANY, Capabilities, Component, ComponentConfig, Kind, Tunable
from kvserve_core.errors import FrameError, NonFiniteError, UnsupportedSpecError
from kvserve_core.plugins import Loaded, Manifest, Provider, load_plugins
from kvserve_core.policy import Candidate, Choice, Decision, Outcome, Policy, ServiceContext
from kvserve_core.registry import Registry
from kvserve_core.spec import Region
from kvserve_core.stages import Codec, Quantizer, Transform
from kvserve_core.tensor import Encoded, Params, Part, Quantized
from plugin_folders import BUILT_INS

LOCAL = Capabilities(planes=ANY, head_local=True, layer_local=True)
KEEPS = replace(LOCAL, exact=True, max_alphabet=2**15)


class GoodTransform(Transform):
    """Halves every value."""

    class Config(ComponentConfig):
        """Nothing to set."""

    caps = LOCAL

    def encode(self, x: Tensor, at: Region) -> tuple[Tensor, Params]:
        return x.float() / 2, {}

    def decode(self, y: Tensor, params: Params, at: Region) -> Tensor:
        return y * 2


class WritesIntoItsInput(GoodTransform):
    """Halves every value."""

    def encode(self, x: Tensor, at: Region) -> tuple[Tensor, Params]:
        y = x.float()
        return y.div_(2) if y is not x else x.div_(2), {}

    def decode(self, y: Tensor, params: Params, at: Region) -> Tensor:
        return y.mul_(2)


class GivesNativeDtype(GoodTransform):
    """Halves every value."""

    def encode(self, x: Tensor, at: Region) -> tuple[Tensor, Params]:
        return x / 2, {}


class LosesBits(GoodTransform):
    """Halves every value."""

    caps = replace(LOCAL, exact=True)

    def encode(self, x: Tensor, at: Region) -> tuple[Tensor, Params]:
        return x / 2, {}


class MixesHeads(GoodTransform):
    """Halves every value."""

    def encode(self, x: Tensor, at: Region) -> tuple[Tensor, Params]:
        mean = x.float().mean(1, keepdim=True)
        return x.float() - mean, {"mean": mean}

    def decode(self, y: Tensor, params: Params, at: Region) -> Tensor:
        return y + params["mean"]


class MixesLayers(GoodTransform):
    """Halves every value."""

    def encode(self, x: Tensor, at: Region) -> tuple[Tensor, Params]:
        mean = x.float().mean(0, keepdim=True)
        return x.float() - mean, {"mean": mean}

    def decode(self, y: Tensor, params: Params, at: Region) -> Tensor:
        return y + params["mean"]


class OneHeadAtATime(GoodTransform):
    """Halves every value."""

    def bind(self, at: Region, *rest: Any) -> GoodTransform:
        if len(at.heads) > 1:
            raise UnsupportedSpecError("one head at a time")
        return super().bind(at, *rest)


class ForgetsLateTokens(GoodTransform):
    """Halves every value."""

    def decode(self, y: Tensor, params: Params, at: Region) -> Tensor:
        return y * (2 if at.start < 2048 else 0)


class ForgetsDeepLayers(GoodTransform):
    """Halves every value."""

    def decode(self, y: Tensor, params: Params, at: Region) -> Tensor:
        return y * (2 if max(at.layers) < 8 else 0)


class ForgetsLongSegments(GoodTransform):
    """Halves every value."""

    def decode(self, y: Tensor, params: Params, at: Region) -> Tensor:
        return y * (2 if at.num_tokens <= 256 else 0)


class KnowsOneStart(GoodTransform):
    """Halves every value."""

    def encode(self, x: Tensor, at: Region) -> tuple[Tensor, Params]:
        return x.float() / 2 + (at.start - 512), {}


class NamesNoDevice(GoodTransform):
    """Halves every value."""

    caps = replace(LOCAL, encode_on=frozenset())


class CannotBeCreated(GoodTransform):
    """Halves every value."""

    def __init__(self, config: Any) -> None:
        raise ValueError("no")


class CannotSayWhatItCanDo(GoodTransform):
    """Halves every value."""

    @property
    def caps(self) -> Capabilities:
        raise ValueError("no")


class NeedsManyTokens(GoodTransform):
    """Halves every value."""

    def encode(self, x: Tensor, at: Region) -> tuple[Tensor, Params]:
        return x.float() / 2, {"largest": x.float().amax(2)}


class PowersOfTwoOnly(GoodTransform):
    """Halves every value."""

    def encode(self, x: Tensor, at: Region) -> tuple[Tensor, Params]:
        if x.shape[-1] & (x.shape[-1] - 1):
            raise ValueError("not a power of two")
        return super().encode(x, at)


class Remembers(GoodTransform):
    """Halves every value."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.seen: list[int] = []

    def encode(self, x: Tensor, at: Region) -> tuple[Tensor, Params]:
        self.seen.append(1)
        return x.float() / 2 + len(self.seen) * 2**-6, {}


class SaysItTakesV(GoodTransform):
    """Halves every value."""

    caps = replace(LOCAL, planes=frozenset({"k", "no-plane-has-this-name"}))

    def bind(self, at: Region, *more: Any) -> Any:
        if at.plane != "k":
            from kvserve_core.errors import UnsupportedSpecError

            raise UnsupportedSpecError(f"no {at.plane}")
        return super().bind(at, *more)


class SaysNothing(GoodTransform):
    """A line that the manifest does not have."""


class WritesWhatItDoesNotRead(GoodTransform):
    """Halves every value."""

    format_version = 2


class OffersWhatItRefuses(GoodTransform):
    """Halves every value."""

    class Config(ComponentConfig):
        """A choice out of range."""

        size: int = Tunable(4, choices=(4, 8), ge=1, le=7)


class GoodQuantizer(Quantizer):
    """Eight bits a head."""

    class Config(ComponentConfig):
        """Nothing to set."""

    caps = replace(LOCAL, max_alphabet=256)

    def encode(self, x: Tensor, at: Region) -> Quantized:
        values = x.float()
        scale = values.abs().amax(3, keepdim=True).clamp_min(1e-30) / 127
        if not bool(scale.isfinite().all()):
            raise NonFiniteError("NaN or Inf")
        codes = ((values / scale).round().clamp(-127, 127) + 127).to(torch.uint8).reshape(-1)
        shape = tuple(x.shape)
        return Quantized((Part(codes, 256, shape[0] * shape[1]),), {"scale": scale}, shape)

    def decode(self, q: Quantized, at: Region) -> Tensor:
        if q.params["scale"].shape != (*q.shape[:3], 1):
            raise FrameError("'scale' has another shape")
        return (q.parts[0].codes.view(q.shape).float() - 127) * q.params["scale"]


class LetsParametersBroadcast(GoodQuantizer):
    """Eight bits a head."""

    def decode(self, q: Quantized, at: Region) -> Tensor:
        return (q.parts[0].codes.view(q.shape).float() - 127) * q.params["scale"]


class LetsOneNumberBeMany(GoodQuantizer):
    """Eight bits a head."""

    def decode(self, q: Quantized, at: Region) -> Tensor:
        scale = q.params["scale"]
        if scale.dim() == 4 and scale.shape != (*q.shape[:3], 1):
            raise FrameError("'scale' has another shape")
        if scale.dim() != 4 and scale.numel() >= q.shape[0] * q.shape[1] * q.shape[2]:
            raise FrameError("'scale' has another shape")
        return (q.parts[0].codes.view(q.shape).float() - 127) * scale


class Exits(GoodQuantizer):
    """Eight bits a head."""

    def encode(self, x: Tensor, at: Region) -> Quantized:
        raise SystemExit(0)


class EndsAGenerator(GoodQuantizer):
    """Eight bits a head."""

    def encode(self, x: Tensor, at: Region) -> Quantized:
        raise GeneratorExit


class DecodesToZeros(GoodQuantizer):
    """Eight bits a head."""

    def decode(self, q: Quantized, at: Region) -> Tensor:
        return super().decode(q, at) * 0


class CodesAboveTheAlphabet(GoodQuantizer):
    """Eight bits a head."""

    def encode(self, x: Tensor, at: Region) -> Quantized:
        q = super().encode(x, at)
        return replace(q, parts=(replace(q.parts[0], alphabet=100),))


class OverflowsOnLargeValues(GoodQuantizer):
    """Eight bits a head."""

    def encode(self, x: Tensor, at: Region) -> Quantized:
        q = super().encode(x, at)
        return replace(q, params={"scale": (q.params["scale"] * 127).half().float() / 127})


class DividesByZero(GoodQuantizer):
    """Eight bits a head."""

    def encode(self, x: Tensor, at: Region) -> Quantized:
        q = super().encode(x, at)
        spread = x.float().amax(3, keepdim=True) - x.float().amin(3, keepdim=True)
        return replace(q, params={"scale": q.params["scale"] * (spread / spread)})


class NeedsContiguous(GoodQuantizer):
    """Eight bits a head."""

    def encode(self, x: Tensor, at: Region) -> Quantized:
        x.view(-1)
        return super().encode(x, at)


class AlwaysEscapes(GoodQuantizer):
    """Eight bits a head."""

    def encode(self, x: Tensor, at: Region) -> Quantized:
        raise NonFiniteError("no")


class DoublesParams(GoodQuantizer):
    """Eight bits a head."""

    def encode(self, x: Tensor, at: Region) -> Quantized:
        q = super().encode(x, at)
        return replace(q, params={"scale": q.params["scale"].double()})


class GoodCodec(Codec):
    """Stores codes as they stand."""

    class Config(ComponentConfig):
        """Nothing to set."""

    caps = KEEPS

    def bound(self, part: Part) -> int:
        return part.nbytes

    def encode(self, parts: Sequence[Part]) -> Sequence[Encoded]:
        return [self.blob(p.codes.clone().view(torch.uint8)) for p in parts]

    @staticmethod
    def blob(data: Tensor) -> Encoded:
        return Encoded(data, torch.tensor(data.numel()))

    def decode(self, blobs: Sequence[Encoded], like: Sequence[Part]) -> Sequence[Tensor]:
        if any(int(b.nbytes) != p.nbytes for b, p in zip(blobs, like, strict=True)):
            raise FrameError("another length")
        return [b.data[: p.nbytes].clone().view(p.codes.dtype) for b, p in zip(blobs, like, strict=True)]


class AboveItsBound(GoodCodec):
    """Stores codes as they stand."""

    def bound(self, part: Part) -> int:
        return part.nbytes // 2


class OneBufferForAll(GoodCodec):
    """Stores codes as they stand."""

    room = torch.empty(2**20, dtype=torch.uint8)

    def encode(self, parts: Sequence[Part]) -> Sequence[Encoded]:
        out, at = [], 0
        for p in parts:
            self.room[at : at + p.nbytes] = p.codes.view(torch.uint8)
            out.append(Encoded(self.room[at : at + p.nbytes], torch.tensor(p.nbytes)))
            at += p.nbytes
        return out


class TrustsTheBytes(GoodCodec):
    """Stores codes as they stand."""

    def decode(self, blobs: Sequence[Encoded], like: Sequence[Part]) -> Sequence[Tensor]:
        return [b.data[: int(b.nbytes)].clone().view(p.codes.dtype) for b, p in zip(blobs, like, strict=True)]


class TakesAPrefix(GoodCodec):
    """Stores codes as they stand."""

    def decode(self, blobs: Sequence[Encoded], like: Sequence[Part]) -> Sequence[Tensor]:
        return super().decode([self.blob(b.data[: p.nbytes]) for b, p in zip(blobs, like, strict=True)], like)


class RaisesItsOwnError(GoodCodec):
    """Stores codes as they stand."""

    def decode(self, blobs: Sequence[Encoded], like: Sequence[Part]) -> Sequence[Tensor]:
        for b, p in zip(blobs, like, strict=True):
            if int(b.nbytes) != p.nbytes:
                raise IndexError("out of range")
        return super().decode(blobs, like)


class ReadsTheRoomBehind(GoodCodec):
    """Stores codes as they stand."""

    def decode(self, blobs: Sequence[Encoded], like: Sequence[Part]) -> Sequence[Tensor]:
        exact = [Encoded(b.data, torch.tensor(b.data.numel())) for b in blobs]
        return super().decode(exact, like)


class DependsOnTheBatch(GoodCodec):
    """Stores codes as they stand."""

    def bound(self, part: Part) -> int:
        return part.nbytes + 1

    def encode(self, parts: Sequence[Part]) -> Sequence[Encoded]:
        tag = torch.tensor([len(parts) % 256], dtype=torch.uint8)
        return [self.blob(torch.cat((tag, p.codes.view(torch.uint8)))) for p in parts]

    def decode(self, blobs: Sequence[Encoded], like: Sequence[Part]) -> Sequence[Tensor]:
        cut = [Encoded(b.data[1:], b.nbytes - 1) for b in blobs]
        return super().decode(cut, like)


class ForgetsTheSecondByte(GoodCodec):
    """Stores codes as they stand."""

    def encode(self, parts: Sequence[Part]) -> Sequence[Encoded]:
        return super().encode([replace(p, codes=p.codes & 0xFF) for p in parts])


class GoodPolicy(Policy):
    """Always the last."""

    class Config(ComponentConfig):
        """Nothing to set."""

    def choose(self, context: ServiceContext, candidates: Sequence[Candidate]) -> Choice:
        return Choice(len(candidates) - 1, "last")


class CountsFromOne(GoodPolicy):
    """Always the last."""

    def choose(self, context: ServiceContext, candidates: Sequence[Candidate]) -> Choice:
        return Choice(len(candidates), "last")


class DividesByTime(GoodPolicy):
    """Always the last."""

    def observe(self, decision: Decision, outcome: Outcome) -> None:
        _ = outcome.wire_bytes / outcome.transfer_s


BAD: tuple[tuple[type, str], ...] = (
    (WritesIntoItsInput, "kinds_of_values"),
    (GivesNativeDtype, "kinds_of_values"),
    (LosesBits, "every_bit_pattern"),
    (MixesHeads, "head_slices"),
    (MixesLayers, "layer_slices"),
    (OneHeadAtATime, "head_slices"),
    (OneHeadAtATime, "layer_slices"),
    (LetsParametersBroadcast, "parameter_shapes"),
    (LetsOneNumberBeMany, "parameter_shapes"),
    (ForgetsLateTokens, "far_from_the_start"),
    (ForgetsDeepLayers, "far_from_the_start"),
    (ForgetsLongSegments, "far_from_the_start"),
    (KnowsOneStart, "decodes_in_a_frame"),
    (DecodesToZeros, "decodes_in_a_frame"),
    (NamesNoDevice, "devices"),
    (CannotBeCreated, "instance"),
    (CannotSayWhatItCanDo, "instance"),
    (Exits, "kinds_of_values"),
    (EndsAGenerator, "kinds_of_values"),
    (NeedsManyTokens, "token_counts"),
    (PowersOfTwoOnly, "head_dims"),
    (Remembers, "deterministic"),
    (Remembers, "prefill_chunks"),
    (SaysItTakesV, "supported_planes"),
    (SaysNothing, "summary"),
    (WritesWhatItDoesNotRead, "format_versions"),
    (OffersWhatItRefuses, "tunable_choices"),
    (CodesAboveTheAlphabet, "kinds_of_values"),
    (OverflowsOnLargeValues, "kinds_of_values"),
    (DividesByZero, "kinds_of_values"),
    (NeedsContiguous, "kinds_of_values"),
    (AlwaysEscapes, "kinds_of_values"),
    (AlwaysEscapes, "decodes_in_a_frame"),
    (DoublesParams, "kinds_of_values"),
    (AboveItsBound, "round_trip"),
    (OneBufferForAll, "outputs_belong_to_the_caller"),
    (TrustsTheBytes, "another_length"),
    (TakesAPrefix, "another_length"),
    (RaisesItsOwnError, "corruption"),
    (ReadsTheRoomBehind, "any_buffer"),
    (DependsOnTheBatch, "alone_and_together"),
    (ForgetsTheSecondByte, "round_trip"),
    (CountsFromOne, "chooses_a_candidate"),
    (DividesByTime, "learns_from_any_outcome"),
)
GOOD: tuple[type, ...] = (GoodTransform, GoodQuantizer, GoodCodec, GoodPolicy)
_KINDS: dict[type, Kind] = {Transform: "transform", Quantizer: "quantizer", Codec: "codec", Policy: "policy"}


def kind_of(cls: type) -> Kind:
    return next(kind for base, kind in _KINDS.items() if issubclass(cls, base))


def name_of(cls: type) -> str:
    return f"bad.{cls.__name__.lower()}"


def registry() -> Registry:
    """The built-ins and all of these."""
    loaded: Loaded = load_plugins(list(BUILT_INS), {})
    for cls in (*GOOD, *dict.fromkeys(cls for cls, _ in BAD)):
        summary = (next(c for c in cls.__mro__ if c in GOOD).__doc__ or "").partition("\n")[0]
        component = Component(name_of(cls), f"{cls.__module__}:{cls.__name__}", summary)
        loaded.manifests.append(Manifest(kind_of(cls), component, Provider("bad", "bad", "1")))
    return Registry(loaded)
