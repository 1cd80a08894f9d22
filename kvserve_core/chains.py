"""Chains bound to places: the stages of each (plane, layer block, head group), created and checked once."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import lcm
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from kvserve_core.artefacts import Artefacts
from kvserve_core.component import Capabilities, ComponentSpec, Kind
from kvserve_core.errors import ConfigError, FrameError, KVServeError, Unacceptable, UnsupportedSpecError
from kvserve_core.host_codec import HostCodec, runs_on
from kvserve_core.plan import RAW_CHAIN_ID, ChainTraits
from kvserve_core.profile import RAW_CHAIN, Chain
from kvserve_core.registry import Registry
from kvserve_core.spec import SEGMENT_TOKENS, DType, KVSpec, Region
from kvserve_core.stages import Codec, Fusion, Quantizer, Stage, Transform
from kvserve_core.tensor import TORCH, Params, Quantized, Shape
from kvserve_core.wire import ChainInfo

log = logging.getLogger(__name__)
F16_MAX = torch.finfo(torch.float16).max
StageT = TypeVar("StageT", bound=Stage)


@dataclass(frozen=True)
class Bound:
    """The stages of one chain at one place. The data path is a straight line through bound methods."""

    transforms: tuple[Transform, ...]
    quantizer: Quantizer
    exact: bool
    dtype: torch.dtype
    fusion: Fusion | None = None

    def quantize(self, x: Tensor, at: Region) -> tuple[list[Params], Quantized]:
        """T and Q: parameters of each stage in order, and the quantizer's streams."""
        params: list[Params] = []
        for transform in self.transforms:
            x, side = transform.encode(x, at)
            params.append(side)
        quantized = self.quantizer.encode(x, at)
        params.append(quantized.params)
        return params, quantized

    @property
    def ok(self) -> Tensor | None:
        """Whether the last :meth:`quantize` can be trusted, as far as transforms on a device had doubts."""
        flags = [t.ok for t in self.transforms if t.ok is not None]
        return torch.stack(flags).all() if flags else None

    def shape(self, x: Shape) -> Shape:
        """What the quantizer sees of an input of shape ``x``."""
        return reduce(lambda shape, t: t.shape(shape), self.transforms, x)

    def restore(self, params: Sequence[Params], quantized: Quantized, at: Region) -> Tensor:
        """The inverse of :meth:`quantize`, in the plane's dtype."""
        x = self.quantizer.decode(quantized, at)
        for transform, side in zip(reversed(self.transforms), reversed(params[:-1]), strict=True):
            x = transform.decode(x, side, at)
        if self.dtype is torch.float16 and not self.exact:  # a grid's top may lie above 65504
            x = x.clamp(-F16_MAX, F16_MAX)
        return x.to(self.dtype)


class ChainSet:
    """The chains of one pipeline, or (with the ``versions`` its header names) of one frame; chain 0 is always raw.

    chains: ``(path, chain)``; the path prefixes errors.
    """

    def __init__(
        self,
        chains: Sequence[tuple[str, Chain]],
        kv: KVSpec,
        device: torch.device,
        registry: Registry,
        artefacts: Artefacts,
        versions: Sequence[Sequence[str]] | None = None,
    ) -> None:
        self.kv, self.device, self.artefacts = kv, device, artefacts
        self._direction: Literal["encode", "decode"] = "encode" if versions is None else "decode"
        self._registry = registry
        self._paths = ["raw", *(path for path, _ in chains)]
        self._chains = [RAW_CHAIN, *(chain for _, chain in chains)]
        self._stages = [self._create(i) for i in range(len(self._chains))]
        if versions is not None:
            self._set_versions(versions)
        self._bound: dict[tuple[int, int, str, tuple[int, ...], tuple[int, ...]], Bound] = {}
        self._codecs: dict[int, Codec] = {}
        self._fusions = [self._fuse(i) for i in range(len(self._chains))]
        self._given_up: set[int] = set()

    def _fuse(self, i: int) -> Fusion | None:
        """The peephole: a kernel for the whole chain, if its quantizer knows one. Optional, so it may not hurt."""
        transforms, quantizer, codec = self._stages[i]
        try:
            return quantizer.fuse(transforms, codec, self.kv, self.device)
        except Exception as error:  # noqa: BLE001  # a kernel that fails to build leaves the stages as they are
            log.warning("%s runs stage by stage: %s: %s", self._paths[i], type(error).__name__, error)
            return None

    def _create(self, i: int) -> tuple[tuple[Transform, ...], Quantizer, Codec]:
        chain, path = self._chains[i], self._paths[i]
        transforms = tuple(
            self._stage("transform", spec, f"{path}.transforms.{n}") for n, spec in enumerate(chain.transforms)
        )
        quantizer = self._stage("quantizer", chain.quantizer, f"{path}.quantizer")
        codec = self._stage("codec", chain.codec, f"{path}.codec")
        return transforms, quantizer, codec

    def _stage(self, kind: Kind, spec: ComponentSpec, path: str) -> Any:
        stage = self._registry.create(kind, spec, path)
        on = stage.caps.encode_on if self._direction == "encode" else stage.caps.decode_on
        if not runs_on(kind, on, self.device.type):
            raise UnsupportedSpecError(
                f"{kind} {spec.name!r} cannot {self._direction} on {self.device.type!r}, only on {sorted(on)}", path
            )
        return stage

    def _set_versions(self, versions: Sequence[Sequence[str]]) -> None:
        """Tell each stage which format version to decode.

        Raises:
            Unacceptable: a version that the installed component does not read, or names that are not the chain's.
        """
        for i, given in enumerate(versions):
            transforms, quantizer, codec = self._stages[i]
            stages = (*transforms, quantizer, codec)
            here = [name.rpartition("@")[0] for name in self._names(i)]
            if here != [name.rpartition("@")[0] for name in given]:
                raise FrameError(f"chain {i} is said to be {list(given)}, its spec makes {here}", "header")
            for stage, name in zip(stages, given, strict=True):
                version = name.rpartition("@")[2]
                if not version.isdecimal() or int(version) not in stage.reads:
                    raise Unacceptable([name], f"format versions {sorted(stage.reads)} are read here")
                stage.version = int(version)

    @property
    def infos(self) -> tuple[ChainInfo, ...]:
        """The chains as a frame header names them, with every default written out: defaults may change, frames not."""
        return tuple(ChainInfo(self._names(i), self._resolved(i)) for i in range(len(self._chains)))

    def _resolved(self, i: int) -> str:
        chain, (transforms, quantizer, codec) = self._chains[i], self._stages[i]
        made = Chain(
            transforms=tuple(map(_spec_of, chain.transforms, transforms)),
            quantizer=_spec_of(chain.quantizer, quantizer),
            codec=_spec_of(chain.codec, codec),
        )
        return made.model_dump_json()

    def _names(self, i: int) -> tuple[str, ...]:
        chain, (transforms, quantizer, codec) = self._chains[i], self._stages[i]
        named: list[tuple[str, str, Stage]] = [
            ("transform", s.name, t) for s, t in zip(chain.transforms, transforms, strict=True)
        ]
        named += [("quantizer", chain.quantizer.name, quantizer), ("codec", chain.codec.name, codec)]
        return tuple(f"{kind}:{name}@{stage.format_version}" for kind, name, stage in named)

    @property
    def used_artefacts(self) -> frozenset[str]:
        """Hashes that decoding needs."""
        return frozenset(h for ts, q, c in self._stages for stage in (*ts, q, c) for h in stage.artefacts)

    def lossless(self, i: int) -> bool:
        """Exact means exact: T, Q and C all are."""
        transforms, quantizer, codec = self._stages[i]
        return all(stage.caps.exact for stage in (*transforms, quantizer, codec))

    def traits(self, i: int) -> ChainTraits:
        """What the planner needs of chain ``i``."""
        transforms, quantizer, _ = self._stages[i]
        caps = [s.caps for s in (*transforms, quantizer)]
        multiple = lcm(*(c.token_multiple for c in caps))
        return ChainTraits(i, all(c.head_local for c in caps), all(c.layer_local for c in caps), multiple)

    def codec(self, i: int) -> Codec:
        """The codec of chain ``i``; one bound object serves all its segments, so that calls are batched."""
        return self._codecs[i]

    def bound(self, i: int, at: Region) -> Bound:
        """The stages of chain ``i`` at a place, bound on first use.

        Raises:
            UnsupportedSpecError, ArtefactError: a stage refuses the place; the path names it.
        """
        key = (i, at.group, at.plane, at.layers, at.heads)
        if key not in self._bound:
            self._bound[key] = self._bind(i, Region(*key[1:], 0, SEGMENT_TOKENS))
        return self._bound[key]

    def fusion(self, i: int, at: Region) -> Fusion | None:
        """The kernels for all of chain ``i`` at a place, if there are any and they work here."""
        return None if i in self._given_up else self.bound(i, at).fusion

    def without_fusion(self, i: int, error: Exception) -> None:
        """Its kernels failed: the stages can do what they cannot, from now on unless it was for want of memory."""
        if not isinstance(error, torch.OutOfMemoryError):
            self._given_up.add(i)
        log.warning("%s runs stage by stage, a kernel failed: %s: %s", self._paths[i], type(error).__name__, error)

    def _bind(self, i: int, at: Region) -> Bound:
        transforms, quantizer, codec = self._stages[i]
        plane = self.kv.group(at.group).plane(at.plane)
        dtype, path = plane.dtype, self._paths[i]
        shape: Shape = (len(at.layers), len(at.heads), at.num_tokens, plane.dim)
        if self.kv.group(at.group).unit == "state" and not self.lossless(i):
            raise UnsupportedSpecError(
                f"plane {at.plane!r} of group {at.group} holds state; use a lossless chain", path
            )
        bound_transforms = []
        for n, transform in enumerate(transforms):
            self._check(transform.caps, at, dtype, f"{path}.transforms.{n}")
            bound = self._at(transform, at, shape, f"{path}.transforms.{n}")
            bound_transforms.append(bound)
            dtype, shape = dtype if transform.caps.exact else DType.F32, bound.shape(shape)
        self._check(quantizer.caps, at, dtype, f"{path}.quantizer")
        if quantizer.caps.exact and dtype != plane.dtype:
            raise UnsupportedSpecError(
                f"an exact quantizer takes {plane.dtype.value!r} only, the transforms before it give {dtype.value!r}",
                f"{path}.quantizer",
            )
        if quantizer.caps.max_alphabet > codec.caps.max_alphabet:
            raise UnsupportedSpecError(
                f"codes alphabets up to {codec.caps.max_alphabet}, the quantizer gives up to"
                f" {quantizer.caps.max_alphabet}; use fewer levels or another codec",
                f"{path}.codec",
            )
        bound_quantizer = self._at(quantizer, at, shape, f"{path}.quantizer")
        if i not in self._codecs:
            self._codecs[i] = self._codec_at(codec, at, shape, f"{path}.codec")
        fusion = self._fusions[i]
        if fusion is not None and not fusion.bind(at, bound_transforms, bound_quantizer):
            fusion = None
        return Bound(tuple(bound_transforms), bound_quantizer, self.lossless(i), TORCH[plane.dtype], fusion)

    def _codec_at(self, codec: Codec, at: Region, shape: Shape, path: str) -> Codec:
        on = codec.caps.encode_on if self._direction == "encode" else codec.caps.decode_on
        if self.device.type in on:
            return self._at(codec, at, shape, path)
        return HostCodec(self._at(codec, at, shape, path, torch.device("cpu")), self.device)

    def _at(self, stage: StageT, at: Region, shape: Shape, path: str, device: torch.device | None = None) -> StageT:
        placed = copy.copy(stage)
        placed.input_shape = shape
        try:
            return placed.bind(at, self.kv, device or self.device, self.artefacts)
        except ConfigError as error:
            raise error.under(path) from error.__cause__
        except Exception as error:  # a stage may raise anything at a place it did not expect
            raise UnsupportedSpecError(f"cannot be bound to {at}: {type(error).__name__}: {error}", path) from error

    @staticmethod
    def _check(caps: Capabilities, at: Region, dtype: DType, path: str) -> None:
        if "*" not in caps.planes and at.plane not in caps.planes:
            raise UnsupportedSpecError(f"plane {at.plane!r} is not supported, only {sorted(caps.planes)}", path)
        if dtype not in caps.dtypes:
            raise UnsupportedSpecError(f"dtype {dtype.value!r} is not supported, only {sorted(caps.dtypes)}", path)


def _spec_of(spec: ComponentSpec, stage: Stage) -> ComponentSpec:
    return ComponentSpec(name=spec.name, configuration=stage.config.model_dump(mode="json"))


def chains_of_frame(infos: Sequence[ChainInfo]) -> list[tuple[str, Chain]]:
    """The chains a frame header describes, without its raw chain 0.

    Raises:
        FrameError: the header's chains are not valid specs, or chain 0 is not raw.
    """
    try:
        chains = [Chain.model_validate_json(info.spec) for info in infos]
    except (ValueError, KVServeError, RecursionError) as error:
        raise FrameError(f"malformed chain: {error}", "header") from None
    if not chains or chains[RAW_CHAIN_ID] != RAW_CHAIN:
        raise FrameError("chain 0 is not the raw chain", "header")
    return [(f"frame.chains.{i}", chain) for i, chain in enumerate(chains)][1:]
