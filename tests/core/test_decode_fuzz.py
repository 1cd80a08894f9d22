"""Hostile frames with right digests, from file bytes to tensors, through every built-in chain.

Only the FrameError family may come out, and a chain that this side cannot build is a typed error before any decoding.
Longer runs: see ``test_frame_fuzz.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from decode_cases import CHAINS, DIM, HEADS, KV, Case, case, decode_file, planes
from frame_cases import Forged, ForgedFile, forge_header, make_file, refusal
from fuzz_settings import fuzz
from kvserve_core.decoder import Decoder
from kvserve_core.errors import FrameError, KVServeError
from kvserve_core.payload import pack
from kvserve_core.spec import KVSpec, LayerGroup, Region
from kvserve_core.tensor import Part
from kvserve_core.wire import Segment

numbers = st.sampled_from([-1, 0, 1, 2, 3, 5, 16, 20, 24, 255, 256, 2**15, 2**16, 2**31, 2**62, 2**63, 2**64 - 1])
names = st.sampled_from(["lo", "scale", "mean", "high.0.lo", "low.0.scale", "", "x"])
dtypes = st.sampled_from(["bfloat16", "float16", "float32", "uint8", "int16", "int32", "float64"])
leaves = st.one_of(numbers, names, dtypes, st.none(), st.booleans(), st.just([]), st.lists(numbers, max_size=5))


def spots(tree: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Paths of all places in nested lists."""
    yield path
    if isinstance(tree, list):
        for i, inner in enumerate(tree):
            yield from spots(inner, (*path, i))


def put(tree: Any, path: tuple[int, ...], value: Any) -> Any:
    if not path:
        return value
    return [put(inner, path[1:], value) if i == path[0] else inner for i, inner in enumerate(tree)]


@st.composite
def metadata(draw: st.DrawFn, meta: bytes) -> bytes:
    tree = msgspec.msgpack.decode(meta)
    for _ in range(draw(st.integers(0, 3))):
        tree = put(tree, draw(st.sampled_from(list(spots(tree)))), draw(leaves))
    return msgspec.msgpack.encode(tree)


@st.composite
def bodies(draw: st.DrawFn, body: bytes) -> bytes:
    data = bytearray(body)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        patch = draw(st.binary(max_size=8) | st.sampled_from([b"\xff\x7f" * 8, b"\x80\x7f" * 8, bytes(32)]))
        data[at : at + len(patch)] = patch
    size = draw(st.sampled_from([len(data)] * 6 + [0, 64, len(data) + 64]))
    return bytes(data[:size]) + bytes(max(0, size - len(data)))


@st.composite
def segments(draw: st.DrawFn, original: Case) -> list[Forged]:
    forged = [Forged.of(original.header, s) for s in original.segments]
    target = draw(st.sampled_from(forged))
    target.meta = draw(metadata(target.meta))
    target.body = draw(bodies(target.body))
    target.fields[10:12] = [len(target.meta), len(target.body)]
    for i, values in ((1, [0, 1, 2]), (2, [0, 1]), (4, [0, 1, 65535]), (5, [0, 1]), (8, [0, 4, 23]), (9, [1, 5, 24])):
        if draw(st.integers(0, 7)) == 0:
            target.fields[i] = draw(st.sampled_from(values))
    return forged


def forge(original: Case, forged: list[Forged], header: dict[str, Any] | None = None) -> bytes:
    body = msgspec.msgpack.encode(msgspec.to_builtins(original.header) | (header or {}))
    return ForgedFile(forge_header(body), original.header.nonce, forged).pack()


@given(st.sampled_from(sorted(CHAINS)), st.data())
@fuzz(2000)
def test_segments(name: str, data: st.DataObject) -> None:
    original = case(name)
    frame = forge(original, data.draw(segments(original)))
    if refusal(lambda: decode_file(frame)) is not None:
        return
    for at, x in decode_file(frame).items():
        assert x.shape == (len(at.layers), len(at.heads), at.num_tokens, DIM)
        assert x.dtype == torch.bfloat16


specs = st.sampled_from([json.dumps(chain) for chain in CHAINS.values()])
configs = st.dictionaries(
    st.sampled_from(["levels", "axis", "group_size", "param_dtype", "seed", "level", "scores", "low_ratio", "high"]),
    st.one_of(numbers, st.floats(), st.sampled_from(["token", "group", "f32", "zstd"]), st.just([[1.0]]), st.none()),
    max_size=3,
)
components = st.builds(
    lambda name, configuration: {"name": name, "configuration": configuration},
    st.sampled_from(["raw", "zstd", "bitpack", "uniform", "mixhq", "hadamard", "bitplane", "identity", "os.system"]),
    configs,
)
made = st.fixed_dictionaries(
    {"quantizer": components, "codec": components}, optional={"transforms": st.lists(components, max_size=3)}
).map(json.dumps)


@given(st.sampled_from(sorted(CHAINS)), st.one_of(specs, made, made, st.text(max_size=20)))
@fuzz(1000)
def test_chains(name: str, spec: str) -> None:
    original = case(name)
    forged = [Forged.of(original.header, s) for s in original.segments]
    chains = msgspec.to_builtins(original.header.chains)
    data = forge(original, forged, {"chains": [chains[0], {"stages": ["codec:x@1"], "spec": spec}]})
    assert refusal(lambda: decode_file(data), KVServeError) != ""


@pytest.mark.parametrize("name", sorted(CHAINS))
@pytest.mark.parametrize("where", ["meta", "body"])
def test_each_byte_of_a_payload(name: str, where: str) -> None:
    """Every byte of a lossy segment replaced, digest fixed: decoded or refused."""
    original = case(name)
    decoder = Decoder(original.header, KV)
    segment = original.segments[-1]
    data = {"meta": segment.meta, "body": bytes(segment.body)}
    for i in range(0, len(data[where]), 1 if where == "meta" else 7):
        changed = bytearray(data[where])
        changed[i] ^= 0xFF
        broken = Segment(segment.index, segment.at, segment.chain, **(data | {where: bytes(changed)}))
        message = refusal(lambda broken=broken: decoder.decode([broken]))
        assert message is None or "plane v" in message


def _peak_reset() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


needs_proc = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc")

BIG_AT = Region(0, "k", (0,), (0, 1), 4, 256)
BIG_KV = KVSpec("tests/big", (LayerGroup(0, (0, 1), planes(HEADS, 64)),))


def hostile(name: str, meta: bytes, body: bytes) -> None:
    """Decode one hostile segment of a larger region; it must be refused within 32 MiB."""
    original = case(name)
    header = msgspec.structs.replace(original.header, fingerprint=BIG_KV.fingerprint, num_tokens=256)
    decoder = Decoder(header, BIG_KV)
    _peak_reset()
    before = _peak_bytes()
    with pytest.raises(FrameError, match="tokens 4-256"):
        decoder.decode([Segment(0, BIG_AT, 1, meta, body)])
    assert _peak_bytes() - before < 32 << 20


@needs_proc
def test_zstd_bomb() -> None:
    bomb = zstandard.compress(bytes(256 << 20))
    honest = Part(torch.zeros(2 * 252 * 64, dtype=torch.uint8), 12)
    hostile("uniform-token_head", *pack([{}], [honest], [bomb]))


@needs_proc
def test_zstd_bomb_without_a_content_size() -> None:
    stream = zstandard.ZstdCompressor().compressobj()
    bomb = stream.compress(bytes(256 << 20)) + stream.flush()
    honest = Part(torch.zeros(2 * 252 * 64, dtype=torch.uint8), 12)
    hostile("uniform-token_head", *pack([{}], [honest], [bomb]))


@needs_proc
@pytest.mark.parametrize("name", sorted(n for n in CHAINS if n.startswith("uniform")))
def test_parameters_that_broadcast_into_a_bomb(name: str) -> None:
    """A scale that fits and 1024 minima on an axis of their own would add up to 126 MiB."""
    lo, scale = torch.zeros(1024, 1, 1, 1, 1), torch.ones(1, 2, 252, 64)
    if name == "uniform-group":
        lo, scale = torch.zeros(1024, 1, 1, 1, 1, 1), torch.ones(1, 2, 252, 8, 8)
    dtype, levels = (torch.int16, 1000) if name == "uniform-wide" else (torch.uint8, 12)
    codes = Part(torch.zeros(2 * 252 * 64, dtype=dtype), levels, 2)
    hostile(name, *pack([{"lo": lo, "scale": scale}], [codes], [None]))


def test_a_frame_of_another_model() -> None:
    original = case("raw")
    with pytest.raises(FrameError, match="same weights"):
        decode_file(make_file(original.header, original.segments), BIG_KV)


def test_nested_chains() -> None:
    """A spec that nests as deep as a header allows."""
    deep: Any = "uniform"
    for _ in range(30):
        deep = {"name": "mixhq", "configuration": {"scores": [[1.0, 2.0], [1.0, 2.0]], "high": deep}}
    for spec in (json.dumps({"quantizer": deep, "codec": "raw"}), '{"quantizer":' + "[" * 3000, "[" * 3000):
        original = case("raw")
        chains = msgspec.to_builtins(original.header.chains)
        forged = [Forged.of(original.header, s) for s in original.segments]
        frame = forge(original, forged, {"chains": [chains[0], {"stages": [], "spec": spec}]})
        assert refusal(lambda frame=frame: decode_file(frame), KVServeError) != ""
