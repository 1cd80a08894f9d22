"""A codec of the CPU in a chain on another device."""

from __future__ import annotations

import torch

from kvserve_core.host_codec import HostCodec, runs_on
from kvserve_core.registry import default_registry
from kvserve_core.spec import DType, KVSpec, LayerGroup, PlanePart, PlaneSpec, Region
from kvserve_core.tensor import Encoded, Part

K = PlaneSpec("k", 1, (PlanePart("k", 16),), DType.BF16)
KV = KVSpec("m", (LayerGroup(0, (0,), (K,)),))
AT = Region(0, "k", (0,), (0,), 0, 256)


def test_it_gives_what_the_wrapped_codec_gives() -> None:
    codec = default_registry().create("codec", "zstd").bind(AT, KV, torch.device("cpu"), None)
    host = HostCodec(codec, torch.device("cpu"))
    part = Part(torch.randint(0, 4, (4096,), dtype=torch.uint8), 4)
    (encoded,) = host.encode([part])
    size = int(encoded.nbytes)
    assert size < part.nbytes <= host.bound(part)
    assert encoded.data[:size].equal(codec.encode([part])[0].data[:size])
    (decoded,) = host.decode([Encoded(encoded.data[:size], encoded.nbytes)], [part])
    assert decoded.equal(part.codes)


def test_what_is_decoded_lands_on_the_device() -> None:
    codec = default_registry().create("codec", "raw").bind(AT, KV, torch.device("cpu"), None)
    part = Part(torch.arange(8, dtype=torch.uint8), 8)
    blob = Encoded(part.codes, torch.tensor(8))
    (decoded,) = HostCodec(codec, torch.device("meta")).decode([blob], [part])
    assert decoded.device.type == "meta"


def test_only_codecs_may_run_on_the_host_for_a_device() -> None:
    cpu = frozenset({"cpu"})
    assert runs_on("codec", cpu, "cuda")
    assert not runs_on("quantizer", cpu, "cuda")
    assert not runs_on("codec", frozenset({"cuda"}), "cpu")
