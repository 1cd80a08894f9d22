"""What the connector takes for granted of the installed engine: a release that changes it fails here by name."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvserve_vllm import compat, plugin
from kvserve_vllm.connector import KVServeConnector
from kvserve_vllm.metadata import StepMeta, WorkerReport
from kvserve_vllm.stats import KVServeStats

NEWER = {"get_transfer_results", "get_required_kvcache_layout", "get_loaded_kv_cache_group_ids"}
"""Hooks that the oldest supported release does not know; the engine calls others in their place there."""


def hooks() -> list[str]:
    names = [
        name for name, value in vars(KVServeConnector).items() if callable(value) or isinstance(value, classmethod)
    ]
    return [name for name in names if not name.startswith("_")]


def test_nothing_abstract_is_left() -> None:
    assert not KVServeConnector.__abstractmethods__
    assert issubclass(KVServeConnector, SupportsHMA)


@pytest.mark.parametrize("name", hooks())
def test_hooks_take_what_the_engine_gives(name: str) -> None:
    base = getattr(KVConnectorBase_V1, name, None) or getattr(SupportsHMA, name, None)
    if base is None:
        assert name in NEWER
        return
    mine = inspect.signature(getattr(KVServeConnector, name)).parameters
    assert list(mine) == list(inspect.signature(base).parameters)


def test_the_constructor_is_the_one_the_factory_asks_for() -> None:
    assert list(inspect.signature(KVServeConnector).parameters) == ["vllm_config", "role", "kv_cache_config"]


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (SchedulerOutput, "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens preempted_req_ids"),
        (SchedulerOutput, "total_num_scheduled_tokens"),
        (NewRequestData, "req_id block_ids num_computed_tokens"),
        (CachedRequestData, "req_ids new_block_ids num_computed_tokens resumed_req_ids"),
        (KVConnectorOutput, "kv_connector_worker_meta invalid_block_ids finished_sending finished_recving"),
        (KVConnectorStats, "data"),
    ],
)
def test_the_engines_values_have_the_fields_that_are_read(value: Any, names: str) -> None:
    assert set(names.split()) <= {f.name for f in dataclasses.fields(value)}


def test_a_request_has_what_is_read_of_it() -> None:
    source = inspect.getsource(Request)
    for name in ("prompt_token_ids", "_all_token_ids", "num_prompt_tokens", "max_tokens", "arrival_time"):
        assert f"self.{name}" in source, name
    for name in ("lora_request", "mm_features", "kv_transfer_params", "request_id", "status"):
        assert f"self.{name}" in source, name
    assert isinstance(Request.num_output_tokens, property)
    assert {"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"} <= set(RequestStatus.__members__)


def test_the_block_pool_can_forget_blocks() -> None:
    assert list(inspect.signature(BlockPool.evict_blocks).parameters) == ["self", "block_ids"]


def test_this_release_is_one_that_is_supported() -> None:
    assert compat.version() >= (0, 28)
    assert compat.unsupported() is None


def test_an_unsupported_release_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat.vllm, "__version__", "0.99.1")
    assert "0.99.1 is outside 0.28 to 0.33" in str(compat.unsupported())


def test_both_ways_to_name_the_connector_find_it() -> None:
    plugin.register()
    plugin.register()  # vLLM calls it in every process, perhaps twice
    short = KVTransferConfig(kv_connector="KVServeConnector", kv_role="kv_both")
    full = KVTransferConfig(
        kv_connector="KVServeConnector", kv_connector_module_path="kvserve_vllm.connector", kv_role="kv_both"
    )
    assert KVConnectorFactory.get_connector_class(short) is KVServeConnector
    assert KVConnectorFactory.get_connector_class(full) is KVServeConnector


def test_reports_of_several_ranks_are_put_together() -> None:
    first, second = WorkerReport(failed=[("a", "x")]), WorkerReport(failed=[("b", "y")])
    joined = first.aggregate(second)
    assert isinstance(joined, WorkerReport)
    assert joined.failed == [("a", "x"), ("b", "y")]
    assert WorkerReport().empty
    assert not joined.empty


def test_an_empty_step_asks_nothing_of_the_workers() -> None:
    assert all(not getattr(StepMeta(), field.name) for field in dataclasses.fields(StepMeta))


def test_stats_add_up_by_kind() -> None:
    stats = KVServeStats(data={})
    stats.add("raw_bytes", 100)
    stats.add("transfers", 1, "consumer", "true")
    stats.add("goodput_bytes_per_second", 5.0, "a")
    stats.add("load_seconds", 0.1)
    more = KVServeStats(data={"raw_bytes": [[[], 20]], "wire_bytes": [[[], 40]]})
    more.add("goodput_bytes_per_second", 7.0, "a")
    more.add("load_seconds", 0.2)
    joined = stats.aggregate(more)
    assert joined.data["raw_bytes"] == [[[], 120]]
    assert joined.data["goodput_bytes_per_second"] == [[["a"], 7.0]]
    assert joined.data["load_seconds"] == [[[], 0.1], [[], 0.2]]
    assert joined.reduce() == {"transfers": 1, "raw MB": 0.0, "wire MB": 0.0, "ratio": 3.0, "fallbacks": 0}
    assert not joined.is_empty()
    joined.reset()
    assert joined.is_empty()
