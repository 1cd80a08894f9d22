"""Settings turned into controller, pipelines and sessions."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvserve_core.deployment import Deployment
from kvserve_core.errors import ConfigError
from kvserve_core.handshake import peer_info
from kvserve_core.latency import Speed
from kvserve_core.library import Profile, ProfileLibrary, QualityRecord
from kvserve_core.policy import Decision
from kvserve_core.profile import PipelineSpec
from kvserve_core.requests import RequestOptions
from kvserve_core.session import Loaded
from kvserve_core.settings import Settings
from kvserve_core.spec import DType, KVSpec, LayerGroup, PlanePart, PlaneSpec, Region, whole
from kvserve_core.transport import Locator

PLANES = tuple(PlaneSpec(n, 2, (PlanePart(n, 32),), DType.BF16) for n in ("k", "v"))
KV = KVSpec("tiny", (LayerGroup(0, (0, 1), PLANES),))
RECORD = QualityRecord(value=0.995, lower=0.993, upper=0.997, metric="exp(-KL)", samples=9)


def profile(name: str, codec: str, artefacts: tuple[str, ...] = ()) -> Profile:
    chain = {"quantizer": {"name": "uniform", "configuration": {"levels": 16}}, "codec": codec}
    return Profile(
        name=name,
        pipeline=PipelineSpec.parse({"planes": {"*": chain}}),
        cr=3.5,
        encode=Speed.of(1e9),
        decode=Speed.of(1e9),
        quality={"default": RECORD},
        artefacts=artefacts,
    )


def library(tmp_path: Path, *profiles: Profile, fingerprint: str = KV.fingerprint) -> Path:
    made = ProfileLibrary(
        model_id="tiny", fingerprint=fingerprint, device="cpu", created="2026-01-01", profiles=profiles
    )
    made.save(tmp_path / "m.kvlib")
    return tmp_path / "m.kvlib"


def test_without_a_library_the_exact_profiles_are_measured_here() -> None:
    deployment = Deployment.load(Settings(), KV)
    raw, lossless = deployment.controller.profiles
    assert (raw.name, lossless.name) == ("raw", "lossless")
    assert 1.2 < lossless.cr < 2.0
    assert min(p.encode.seconds(1e6) for p in (raw, lossless)) > 0
    assert deployment.pipelines(whole(KV)).keys() == {"raw", "lossless"}


def test_a_library_of_another_model_is_said_and_its_profiles_stay_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = library(tmp_path, profile("u4", "zstd"), fingerprint="f" * 64)
    deployment = Deployment.load(Settings(library=path, bandwidth=1e6), KV)
    assert "this engine serves tiny" in caplog.text
    assert deployment.controller.choose(deployment.context(1000)).profile in ("raw", "lossless")


def test_a_request_gets_its_own_options_or_those_of_the_deployment(tmp_path: Path) -> None:
    path = library(tmp_path, profile("u4", "zstd"))
    deployment = Deployment.load(Settings(library=path, bandwidth=1e6, slo=5.0, min_quality=0.99), KV)
    context = deployment.context(1000, acceptable=frozenset({"raw", "u4"}))
    assert (context.nbytes, context.slo_s, context.workload) == (1000 * KV.token_bytes(), 5.0, "default")
    assert deployment.controller.choose(context).profile == "u4"
    strict = deployment.context(1000, RequestOptions("code", 0.5, 0.999))
    assert (strict.workload, strict.slo_s) == ("code", 0.5)
    assert deployment.controller.choose(strict).profile != "u4"


def test_profiles_that_cannot_run_here_are_left_out_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = library(tmp_path, profile("u4", "zstd"), profile("gpu", "nvcomp_ans"))
    deployment = Deployment.load(Settings(library=path), KV)
    assert deployment.pipelines(whole(KV)).keys() == {"raw", "lossless", "u4"}
    assert "nvcomp" in deployment.refused["gpu"]
    assert "profile 'gpu' cannot be used here" in caplog.text


def test_what_an_unknown_and_a_known_peer_can_read(tmp_path: Path) -> None:
    path = library(tmp_path, profile("u4", "zstd"))
    portable = Deployment.load(Settings(library=path), KV)
    pipelines = portable.pipelines(whole(KV))
    assert portable.acceptable(pipelines, None) == {"raw", "lossless", "u4"}
    everything = Deployment.load(Settings.model_validate({"library": path, "peers": {"accept": "any"}}), KV)
    assert everything.acceptable(pipelines, None) == set(pipelines)
    peer = peer_info(KV, whole(KV), portable.registry)
    reads = {stage: versions for stage, versions in peer.reads.items() if stage != "quantizer:uniform"}
    old = type(peer)(peer.wire, reads, "cpu", KV.fingerprint, peer.shard)
    assert portable.acceptable(pipelines, old) == {"raw", "lossless"}


def test_a_transport_that_keeps_nothing_is_no_store(tmp_path: Path) -> None:
    settings = Settings.model_validate({"transport": {"name": "tcp", "file": {"path": str(tmp_path)}}})
    deployment = Deployment(settings, KV)
    with pytest.raises(ConfigError, match="'tcp' keeps nothing"):
        deployment.store()
    assert deployment.store("file").persistent
    deployment.close()


def test_a_fault_that_nobody_injects_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSERVE_FAULT", "zeros")
    deployment = Deployment(Settings(), KV)
    with pytest.raises(ConfigError, match="unknown fault 'zeros'; did you mean 'zero'"):
        deployment.consumer(whole(KV), lambda transfer_id, at, x: None)
    deployment.close()


@pytest.mark.parametrize("fault", ["", "zero"])
def test_sessions_move_a_cache_and_the_fault_zeroes_it(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSERVE_FAULT", fault)
    deployment = Deployment(Settings(), KV)
    cache = torch.randn(2, 2, 300, 32).to(torch.bfloat16)
    got = {name: torch.full_like(cache, 7) for name in ("k", "v")}

    def gather(transfer_id: str, at: Region) -> Tensor:
        return cache[at.layers, :][:, at.heads, at.start : at.stop]

    def scatter(transfer_id: str, at: Region, x: Tensor) -> None:
        for layer, of_layer in zip(at.layers, x, strict=True):
            got[at.plane][layer, list(at.heads), at.start : at.stop] = of_layer

    producer = deployment.producer(deployment.pipelines(whole(KV)), gather)
    consumer = deployment.consumer(whole(KV), scatter)
    try:
        endpoint = producer.open("t", 300, Decision("lossless", "forced", deployment.context(300), 1e9))
        producer.ready("t", range(300))
        consumer.fetch(Locator("t", 300, (endpoint,), "lossless"), range(300), time.monotonic() + 30)
        events: list[object] = []
        while not events:
            events += consumer.poll()
            time.sleep(0.001)
        assert isinstance(events[0], Loaded)
        expected = torch.zeros_like(cache) if fault else cache
        assert all(torch.equal(x, expected) for x in got.values())
    finally:
        producer.close()
        consumer.close()
        deployment.close()


def test_the_workload_is_the_request_s_or_the_classifier_s_or_the_deployment_s() -> None:
    chosen = Deployment(Settings(classifier={"name": "rules"}, workload="mixed"), KV)  # type: ignore[arg-type]  # as in a config file
    prompt = "Write a Python function that reverses a list."
    assert chosen.context(10, prompt=prompt).workload == "code"
    assert chosen.context(10, RequestOptions(workload="support"), prompt=prompt).workload == "support"
    assert chosen.context(10).workload == "mixed"
    assert Deployment(Settings(workload="mixed"), KV).context(10, prompt=prompt).workload == "mixed"


def test_the_controller_gets_the_links_and_the_form_of_the_settings() -> None:
    made = Deployment(Settings.model_validate({"priors": {"east": "5Gbps"}, "chunk_bytes": "4MiB"}), KV)
    assert made.controller.links.estimate("east") == 6.25e8
    assert made.controller.links.estimate("west") == made.settings.bandwidth
    assert made.controller.form.chunk_bytes == 4 * 2**20
    assert made.context(100, link="east", store=True).intent == "store"
