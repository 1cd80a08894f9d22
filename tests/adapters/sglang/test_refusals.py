"""What is refused when a server starts or a message comes, by name; nothing of SGLang is imported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvserve_core.errors import FrameError, UnsupportedSpecError
from kvserve_sglang import pools
from kvserve_sglang.checks import check_manager
from kvserve_sglang.hicache_pages import check_host_pool
from kvserve_sglang.messages import TAG, Decided, pack, unpack

NAMED = Decided(1, "t", "raw", "why", "link")


def manager(**given: Any) -> Any:
    """One that is carried, but for what is ``given``."""
    plain = {"attn_cp_size": 1, "enable_all_cp_ranks_for_transfer": False, "dcp_size": 1}
    entries = SimpleNamespace(num_draft_entries=given.pop("num_draft_entries", 0))
    return SimpleNamespace(**(plain | {"kv_args": entries} | given))


@pytest.mark.parametrize(
    "carried",
    [
        {},
        {"attn_cp_size": 2},
        {"enable_all_cp_ranks_for_transfer": True},
        {"kv_shard_size": 1, "defer_decode_allocation": False},
    ],
    ids=str,
)
def test_managers_that_are_carried(carried: dict[str, Any]) -> None:
    check_manager(manager(**carried))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"attn_cp_size": 2, "enable_all_cp_ranks_for_transfer": True}, "context-parallel prefill"),
        ({"kv_shard_size": 2}, "--enable-kv-cache-sharding"),
        ({"dcp_size": 2}, "decode context parallelism"),
        ({"defer_decode_allocation": True}, "--disaggregation-decode-allocation-policy prefill_complete"),
        ({"num_draft_entries": 1}, "speculative decoding"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_topologies_and_modes_that_are_not_carried(given: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedSpecError, match=f"{named}.*another transfer backend"):
        check_manager(manager(**given))


class MHATokenToKVPool:
    """A pool of a known name."""

    def __init__(self, **given: Any) -> None:
        self.__dict__.update(given)


class SWAKVPool:
    """Two pools in one."""

    def __init__(self, full: object, sliding: object) -> None:
        self.full_kv_pool, self.swa_kv_pool = full, sliding


PLAIN = MHATokenToKVPool()


def test_pools_that_are_carried() -> None:
    pools.check_pool(PLAIN)
    pools.check_pool(SWAKVPool(PLAIN, PLAIN))
    pools.check_pool(MHATokenToKVPool(kv_cache_layout="nhd", is_quantized_kv_cache=False, layer_shard_enabled=False))


@pytest.mark.parametrize(
    ("pool", "named"),
    [
        (object(), "KV pool 'object'"),
        (SWAKVPool(PLAIN, object()), "KV pool 'object'"),
        (MHATokenToKVPool(kv_cache_layout="hnd"), "KV layout 'hnd'"),
        (MHATokenToKVPool(is_quantized_kv_cache=True), "'MHATokenToKVPool' with quantized or sharded layers"),
        (SWAKVPool(MHATokenToKVPool(layer_shard_enabled=True), PLAIN), "with quantized or sharded layers"),
    ],
    ids=["kind", "part", "layout", "quantized", "sharded"],
)
def test_pools_that_are_not_known(pool: object, named: str) -> None:
    with pytest.raises(UnsupportedSpecError, match=named):
        pools.check_pool(pool)


class MHATokenToKVPoolHost:
    """A host pool of a known name and, but for what is ``given``, one that is carried."""

    def __init__(self, **given: Any) -> None:
        self.__dict__.update({"layout": "layer_first", "layer_num": 2} | given)


def test_host_pools_that_are_carried() -> None:
    check_host_pool(MHATokenToKVPoolHost())
    check_host_pool(MHATokenToKVPoolHost(target_layer_num=2, dcp_size=1))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"layout": "page_head"}, "the host layout 'page_head'"),
        ({"target_layer_num": 1}, "a draft model's layers"),
        ({"dcp_size": 2}, "decode context parallelism"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_host_pools_that_are_not_known(given: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedSpecError, match=f"does not know {named}"):
        check_host_pool(MHATokenToKVPoolHost(**given))


def test_a_host_pool_of_another_kind_is_named() -> None:
    with pytest.raises(UnsupportedSpecError, match="the host pool 'SimpleNamespace'"):
        check_host_pool(SimpleNamespace(layout="layer_first", layer_num=2))


def test_messages_come_back_and_sglangs_own_are_left_alone() -> None:
    assert unpack(pack(NAMED)) == NAMED
    assert unpack([]) is None
    assert unpack([b"KVSERVE_STATUS", b"{}"]) is None


@pytest.mark.parametrize(
    "rest",
    [
        [],
        [b""],
        [b"{"],
        [b"\xff"],
        [b'{"type":"Other"}'],
        [b'{"type":"Decided","room":"one"}'],
        [b'{"type":"Decided"}'],
    ],
    ids=str,
)
def test_a_message_of_ours_that_is_malformed_says_what_to_do(rest: list[bytes]) -> None:
    with pytest.raises(FrameError, match=r"cannot be read.*same kvserve on both sides"):
        unpack([TAG, *rest])
