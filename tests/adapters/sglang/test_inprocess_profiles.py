"""Profiles, negotiation, request options and the checksum flag, with the real SGLang in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import inprocess
import msgspec
import pytest
import torch
from inprocess import MHA, Pair, mha_pool, pages_of, spy, wait

from kvserve_core.errors import ConfigError, UnsupportedSpecError
from kvserve_core.latency import Speed
from kvserve_core.library import Profile, ProfileLibrary, QualityRecord
from kvserve_core.profile import PipelineSpec
from kvserve_core.requests import RequestOptions
from kvserve_core.settings import Settings
from kvserve_sglang.decode import DecodeSide
from kvserve_sglang.manager import KVServeManager
from kvserve_sglang.spec import model_spec

CHAIN = {"transforms": ["hadamard"], "quantizer": {"name": "uniform", "configuration": {"levels": 16}}, "codec": "zstd"}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A library with one lossy profile, and a link so slow that it pays."""
    kv = model_spec(MHA, torch.bfloat16, "test-model", None)
    profile = Profile(
        name="quick",
        pipeline=PipelineSpec.model_validate({"planes": {"*": CHAIN}}),
        cr=4.0,
        encode=Speed.of(1e9),
        decode=Speed.of(1e9),
        quality={"default": QualityRecord(value=0.996, lower=0.995, upper=0.997, metric="top1", samples=100)},
    )
    library = ProfileLibrary(
        model_id=kv.model_id, fingerprint=kv.fingerprint, device="cpu", created="2026-11-30", profiles=(profile,)
    )
    library.save(tmp_path / "test.kvlib")
    return Settings(library=tmp_path / "test.kvlib", bandwidth=1e6)


def send(pair: Pair, room: int, options: RequestOptions = inprocess.OPTIONS) -> tuple[bool, float, str]:
    """Whether pages arrived exactly, the largest error, and the profile."""
    total = 600
    source, target = pages_of(total, room, 16), pages_of(total, room + 1, 16)
    (sender,), (receiver,) = pair.request(room, target)
    pair.write_aux(room)
    sender.init(len(source), aux_index=1)
    sender.describe(total, options)
    with pytest.MonkeyPatch.context() as patch:
        told = spy(patch, pair.prefill.manager.side._rank.rooms, "tell")
        sender.send(source, num_kv_tokens=total)
        assert pair.settle(receiver) == ["Success"]
    profile = told[0][1].profile
    mine, theirs = inprocess.slots(source, 16, total), inprocess.slots(target, 16, total)
    buffers = zip(pair.prefill.pool.k_buffer, pair.decode.pool.k_buffer, strict=True)
    worst = max(float((a[mine].float() - b[theirs].float()).abs().max()) for a, b in buffers)
    exact = pair.same(source, target, total)
    sender.clear()
    receiver.clear()
    return exact, worst, profile


def test_a_lossy_profile_is_chosen_where_it_pays_and_the_controller_hears_of_it(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Pair(mha_pool, MHA, 16, settings) as pair:
        seen = spy(monkeypatch, pair.prefill.manager.setup.deployment.controller, "observe")
        exact, worst, profile = send(pair, 60)
        assert (exact, profile) == (False, "quick")
        assert worst < 1.0
        decision, outcome = wait(lambda: seen, "the report")[0]
        assert decision.profile == outcome.profile == "quick"
        assert outcome.link == "127.0.0.1"
        assert outcome.ok
        assert 0 < outcome.wire_bytes < outcome.raw_bytes / 2
        assert min(outcome.encode_s, outcome.decode_s, outcome.total_s) > 0


def test_a_request_may_ask_for_more_quality_than_the_deployment(settings: Settings) -> None:
    with Pair(mha_pool, MHA, 16, settings) as pair:
        exact, _, profile = send(pair, 61, RequestOptions(min_quality=1.0))
        assert exact
        assert profile == "lossless"


def test_what_the_decode_rank_cannot_read_is_not_sent(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    real = DecodeSide.peer

    def narrower(side: DecodeSide, size: int) -> Any:
        peer = real(side, size)
        reads = {stage: versions for stage, versions in peer.reads.items() if stage != "quantizer:uniform"}
        return msgspec.structs.replace(peer, reads=reads)

    monkeypatch.setattr(DecodeSide, "peer", narrower)
    with Pair(mha_pool, MHA, 16, settings) as pair:
        exact, _, profile = send(pair, 62)
        assert exact
        assert profile == "lossless"


def test_a_decode_server_that_shares_prefixes_gets_exact_profiles_unless_it_may_share_lossy_ones(
    settings: Settings,
) -> None:
    sharing = {"disaggregation_decode_enable_radix_cache": True}
    with Pair(mha_pool, MHA, 16, settings, flags=sharing) as pair:
        assert send(pair, 64)[2] == "lossless"
    allowed = settings.model_copy(update={"lossy_prefix_cache": "allow"})
    with Pair(mha_pool, MHA, 16, allowed, flags=sharing) as pair:
        assert send(pair, 65)[2] == "quick"


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ({"name": "magic"}, "unknown policy 'magic'"),
        ({"name": "static", "configuration": {"profile": "zzz"}}, "unknown profile 'zzz'"),
        ({"name": "static"}, "profile"),
        ({"name": "analytic", "configuration": {"foo": 1}}, "foo"),
    ],
)
def test_a_policy_that_cannot_be_had_keeps_the_server_from_starting(policy: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason), Pair(mha_pool, MHA, 16, Settings.model_validate({"policy": policy})):
        pass


def test_a_library_that_is_not_there_is_refused_and_nothing_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = spy(monkeypatch, KVServeManager, "close")
    with pytest.raises(ConfigError, match="nope"), Pair(mha_pool, MHA, 16, Settings(library=Path("/nope"))):
        pass
    assert closed[0][0]._zmq_ctx.closed


def test_a_decode_server_that_would_receive_into_host_memory_does_not_start() -> None:
    flag = {"disaggregation_decode_host_receive_threshold": 0.5}
    with pytest.raises(UnsupportedSpecError, match="host-receive-threshold"), Pair(mha_pool, MHA, 16, flags=flag):
        pass


CHECKSUM = {"disaggregation_enable_kv_checksum": True}


def test_the_checksum_flag_and_a_lossy_profile_exclude_each_other(settings: Settings) -> None:
    pair = Pair(mha_pool, MHA, 16, settings, flags=CHECKSUM)
    with pytest.raises(ConfigError, match=r"kv-checksum .* 'quick'; leave the flag out, or set min_quality = 1"), pair:
        pass


def test_min_quality_1_restricts_it_to_exact_profiles(settings: Settings) -> None:
    strict = settings.model_copy(update={"min_quality": 1.0})
    with Pair(mha_pool, MHA, 16, strict, flags=CHECKSUM) as pair:
        exact, _, profile = send(pair, 63)
        assert exact
        assert profile == "lossless"
