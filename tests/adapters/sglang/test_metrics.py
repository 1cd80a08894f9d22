"""The series that go into SGLang's endpoint: vLLM's names, and what each event adds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import small_models
from prometheus_client import REGISTRY

from kvserve_core.deployment import Deployment
from kvserve_core.metric_names import METRICS
from kvserve_core.policy import Decision, Outcome, ServiceContext
from kvserve_core.settings import Settings
from kvserve_sglang.metrics import OWN, Exporter

OUTCOME = Outcome("t", "raw", 100, 50, encode_s=0.1, transfer_s=0.2, decode_s=0.3, total_s=0.6, link="10.0.0.1")


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"kvserve:{name}", labels) or 0.0


@pytest.fixture
def exporter() -> Exporter:
    return Exporter(True)


@pytest.fixture
def deployment() -> Iterator[Deployment]:
    made = Deployment.load(Settings(), small_models.model())
    yield made
    made.close()


class Grown:
    """By how much a series grew since it was first asked for."""

    def __init__(self) -> None:
        self._before: dict[Any, float] = {}

    def __call__(self, name: str, **labels: str) -> float:
        key = (name, *sorted(labels.items()))
        now = value(name, **labels)
        return now - self._before.setdefault(key, now)


@pytest.fixture
def grown() -> Grown:
    return Grown()


def test_every_series_of_the_common_table_is_registered_under_its_name(exporter: Exporter) -> None:
    assert exporter is not None
    found = {family.name for family in REGISTRY.collect()}
    assert {metric.full_name for metric in (*METRICS, *OWN)} <= found


def test_a_second_exporter_of_a_process_adds_to_the_same_series(exporter: Exporter, grown: Grown) -> None:
    grown("decisions_total", profile="raw", reason="test")
    exporter.count("decisions", profile="raw", reason="test")
    Exporter(True).count("decisions", 2, profile="raw", reason="test")
    assert grown("decisions_total", profile="raw", reason="test") == 3


def test_without_metrics_nothing_is_counted(grown: Grown) -> None:
    silent = Exporter(False)
    grown("raw_bytes_total")
    silent.transfer(OUTCOME, "producer")
    silent.set("published_bytes", 77)
    assert grown("raw_bytes_total") == 0
    assert value("published_bytes") != 77


def test_bytes_of_a_pair_count_once_and_seconds_where_they_are_spent(exporter: Exporter, grown: Grown) -> None:
    names = ("raw_bytes_total", "wire_bytes_total", "encode_seconds_sum", "transfer_seconds_sum", "decode_seconds_sum")
    before = [grown(name) for name in (*names, "load_seconds_sum", "compression_ratio_sum")]
    for side in ("producer", "consumer"):
        grown("transfers_total", side=side, ok="true")
        exporter.transfer(OUTCOME, side)
        assert grown("transfers_total", side=side, ok="true") == 1
    after = [grown(name) for name in (*names, "load_seconds_sum", "compression_ratio_sum")]
    assert not any(before)
    assert after == pytest.approx([100, 50, 0.1, 0.2, 0.3, 0.6, 2.0])


def settle(exporter: Exporter, deployment: Deployment, slo_s: float | None) -> None:
    context = ServiceContext(nbytes=10_000_000, slo_s=slo_s, model_s=0.5, link="10.0.0.1")
    deployment.controller.links.observe("10.0.0.1", 1_000_000, 1.0)
    exporter.settled(deployment.controller, Decision("lossless", "test", context, 1e6), _as("lossless"))


def _as(profile: str) -> Outcome:
    return Outcome("t", profile, 100, 50, encode_s=0.1, total_s=0.6, link="10.0.0.1")


@pytest.mark.parametrize(("slo_s", "missed"), [(None, 0), (1.3, 0), (1.1, 1)])
def test_a_settled_transfer_is_late_when_prefill_encoding_and_loading_are_over_the_budget(
    exporter: Exporter, deployment: Deployment, grown: Grown, slo_s: float | None, missed: int
) -> None:
    grown("slo_misses_total")
    settle(exporter, deployment, slo_s)
    assert grown("slo_misses_total") == missed


def test_a_settled_transfer_shows_its_link_and_from_where_its_profile_pays(
    exporter: Exporter, deployment: Deployment
) -> None:
    settle(exporter, deployment, None)
    assert value("goodput_bytes_per_second", link="10.0.0.1") == deployment.controller.links.estimate("10.0.0.1")
    priced = next(p for p in deployment.controller.feasible(ServiceContext(0)) if p.profile.name == "lossless")
    encode_s, decode_s, wire_bytes = priced.costs(10_000_000)
    pays_below = (10_000_000 - wire_bytes) / (encode_s + decode_s)
    assert value("break_even_bytes_per_second", profile="lossless") == pytest.approx(pays_below)
