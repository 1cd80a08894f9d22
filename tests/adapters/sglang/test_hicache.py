"""HiCache's storage over real host pools: every layout comes back byte for byte, and what fails costs a page only."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hicache_pools import LAYOUTS, PAGE, fill, host_pool, info, keys_of, slots, storage, storage_config
from sglang.srt.mem_cache.hicache_storage import PoolName

from kvserve_core.errors import ConfigError, KVServeError, UnsupportedSpecError

FP8 = torch.float8_e4m3fn
WRITTEN, READ = [5, 3, 9], [20, 40, 21]


def same(pool: Any, pages: list[int], written: list[torch.Tensor]) -> bool:
    found = [pool.get_data_page(page * PAGE) for page in pages]
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(found, written, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kind", "dtype"), [("mha", torch.bfloat16), ("mla", torch.bfloat16), ("mha", FP8)])
def test_pages_come_back_byte_for_byte_in_another_process_and_are_smaller(
    kind: str, dtype: torch.dtype, layout: str, tmp_path: Path
) -> None:
    keys, config = keys_of(3), storage_config(kind, tmp_path)
    pool = host_pool(kind, layout, dtype)
    with storage(kind, pool, config) as first:
        written = fill(pool, WRITTEN)
        assert first.batch_exists(keys) == 0
        assert first.batch_set_v1(keys, slots(WRITTEN)) == [True] * 3
    other = host_pool(kind, layout, dtype)
    with storage(kind, other, config) as second:
        assert second.batch_exists([*keys, *keys_of(1, first=7)]) == 3
        assert second.batch_get_v1(keys, slots(READ)) == [True] * 3
        assert same(other, READ, written)
        assert not other.get_data_page(30 * PAGE).view(torch.uint8).any(), "a page that nobody asked for was written"
    files = list(tmp_path.glob("*.kvframe"))
    assert len(files) == 3, "the self-test must leave nothing behind"
    assert sum(f.stat().st_size for f in files) < sum(w.nbytes for w in written)


def test_layouts_of_one_model_read_each_others_pages(tmp_path: Path) -> None:
    keys, config = keys_of(3), storage_config("mha", tmp_path)
    pools = {layout: host_pool("mha", layout) for layout in LAYOUTS}
    with storage("mha", pools["layer_first"], config) as first:
        fill(pools["layer_first"], WRITTEN)
        assert all(first.batch_set_v1(keys, slots(WRITTEN)))
    whole = torch.stack([pools["layer_first"].kv_buffer[:, :, p * PAGE : (p + 1) * PAGE] for p in WRITTEN])
    with storage("mha", pools["page_first_direct"], config) as second:
        assert all(second.batch_get_v1(keys, slots(READ)))
        assert torch.equal(pools["page_first_direct"].kv_buffer[:, READ].transpose(0, 1), whole)


def test_tensor_parallel_ranks_keep_pages_of_their_own_and_mla_ranks_share_them(tmp_path: Path) -> None:
    keys = keys_of(1)
    for rank in range(2):
        pool = host_pool("mha", "layer_first", ranks=2)
        with storage("mha", pool, storage_config("mha", tmp_path / "mha", rank, 2)) as made:
            assert made.batch_exists(keys) == 0
            fill(pool, [4])
            assert made.batch_set_v1(keys, slots([4])) == [True]
            assert made.batch_exists(keys) == 1
    pool = host_pool("mla", "layer_first")
    with storage("mla", pool, storage_config("mla", tmp_path / "mla", 0, 2)) as made:
        assert made.batch_set_v1(keys, slots([4])) == [True]
    with storage("mla", pool, storage_config("mla", tmp_path / "mla", 1, 2)) as made:
        assert made.batch_exists(keys) == 1


def test_a_damaged_page_is_not_loaded_and_not_met_again(tmp_path: Path) -> None:
    keys = keys_of(3)
    pool = host_pool("mha", "layer_first")
    with storage("mha", pool, storage_config("mha", tmp_path)) as made:
        written = fill(pool, WRITTEN)
        before = set(tmp_path.glob("*.kvframe"))
        assert made.batch_set_v1(keys[:1], slots(WRITTEN[:1])) == [True]
        assert made.batch_set_v1(keys[1:2], slots(WRITTEN[1:2])) == [True]
        newest = max(set(tmp_path.glob("*.kvframe")) - before, key=lambda f: f.stat().st_ctime_ns)
        assert made.batch_set_v1(keys[2:], slots(WRITTEN[2:])) == [True]
        data = bytearray(newest.read_bytes())
        data[len(data) // 2] ^= 1
        newest.write_bytes(data)
        assert made.batch_get_v1(keys, slots(READ)) == [True, False, True]
        assert same(pool, [READ[0], READ[2]], [written[0], written[2]])
        assert made.batch_exists(keys) == 1
        assert made.batch_set_v1(keys, slots(WRITTEN)) == [True] * 3
        assert made.batch_get_v1(keys, slots(READ)) == [True] * 3


def test_a_page_under_another_pages_name_is_not_loaded_and_not_met_again(tmp_path: Path) -> None:
    keys = keys_of(2)
    pool = host_pool("mha", "layer_first")
    with storage("mha", pool, storage_config("mha", tmp_path)) as made:
        written = fill(pool, WRITTEN[:2])
        first, second = (stored(made, tmp_path, key, page) for key, page in zip(keys, WRITTEN[:2], strict=True))
        second.write_bytes(first.read_bytes())
        assert made.batch_get_v1(keys, slots(READ[:2])) == [True, False]
        assert made.batch_exists(keys) == 1
        assert made.batch_set_v1(keys, slots(WRITTEN[:2])) == [True, True]
        assert made.batch_get_v1(keys, slots(READ[:2])) == [True, True]
        assert same(pool, READ[:2], written)


def stored(made: Any, folder: Path, key: str, page: int) -> Path:
    """The file of a page that is stored now."""
    before = set(folder.glob("*.kvframe"))
    assert made.batch_set_v1([key], slots([page])) == [True]
    (file,) = set(folder.glob("*.kvframe")) - before
    return file


def test_a_pipe_under_a_pages_name_and_a_folder_that_is_gone_cost_pages_only(tmp_path: Path) -> None:
    keys, folder = keys_of(2), tmp_path / "store"
    pool = host_pool("mha", "layer_first")
    with storage("mha", pool, storage_config("mha", folder)) as made:
        fill(pool, WRITTEN[:2])
        file = stored(made, folder, keys[0], WRITTEN[0])
        file.unlink()
        os.mkfifo(file)
        assert made.batch_exists(keys) == 0
        assert made.batch_set_v1(keys, slots(WRITTEN[:2])) == [True, True]
        assert made.batch_get_v1(keys, slots(READ[:2])) == [True, True]
        shutil.rmtree(folder)
        assert made.batch_get_v1(keys, slots(READ[:2])) == [False, False]
        assert made.batch_set_v1(keys, slots(WRITTEN[:2])) == [True, True]
        assert made.batch_exists(keys) == 2


def test_a_page_that_is_named_twice_comes_once(tmp_path: Path) -> None:
    one, other = keys_of(2)
    pool = host_pool("mha", "layer_first")
    with storage("mha", pool, storage_config("mha", tmp_path)) as made:
        written = fill(pool, WRITTEN[:2])
        assert made.batch_set_v1([one, other], slots(WRITTEN[:2])) == [True, True]
        assert made.batch_get_v1([one, one, other], slots(READ)) == [True, False, True]
        assert same(pool, [READ[0], READ[2]], written)


@pytest.mark.parametrize("policy", [{"name": "magic"}, {"name": "static", "configuration": {"profile": "zzz"}}])
def test_a_policy_that_cannot_be_had_keeps_the_server_from_starting(policy: dict[str, Any], tmp_path: Path) -> None:
    config = storage_config("mha", tmp_path, policy=policy)
    with pytest.raises(ConfigError, match="unknown"):
        storage("mha", host_pool("mha", "layer_first"), config).__enter__()


def test_a_store_without_room_costs_pages_and_no_exception(tmp_path: Path) -> None:
    small = {"transport": {"file": {"path": str(tmp_path), "max_bytes": "64KiB"}}}
    pool = host_pool("mha", "layer_first")
    with storage("mha", pool, storage_config("mha", tmp_path, **small)) as made:
        for i in range(8):
            fill(pool, [i], seed=i)
            assert made.batch_set_v1(keys_of(1, first=i), slots([i])) == [True]
        assert [made.exists(keys_of(1, first=i)[0]) for i in (0, 7)] == [False, True], "the oldest pages make room"
    tiny = {"transport": {"file": {"path": str(tmp_path), "max_bytes": "1KiB"}}}
    with pytest.raises(KVServeError, match=r"failed its self-test.*max_bytes"):
        storage("mha", pool, storage_config("mha", tmp_path, **tiny)).__enter__()


def test_a_prefix_of_zeros_is_the_negative_control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = host_pool("mha", "layer_first")
    with storage("mha", pool, storage_config("mha", tmp_path)) as made:
        fill(pool, WRITTEN)
        assert all(made.batch_set_v1(keys_of(3), slots(WRITTEN)))
    monkeypatch.setenv("KVSERVE_FAULT", "zero")
    with pytest.raises(KVServeError, match="came back from the store with other bytes"):
        storage("mha", pool, storage_config("mha", tmp_path)).__enter__()


def test_what_is_not_carried_is_refused_by_name(tmp_path: Path) -> None:
    config = storage_config("mha", tmp_path)
    config.extra_config.pop("interface_v1")
    with pytest.raises(ConfigError, match="interface_v1"):
        storage("mha", host_pool("mha", "layer_first"), config).__enter__()
    config = storage_config("mha", tmp_path)
    with pytest.raises(UnsupportedSpecError, match="--page-size"):
        storage("mha", host_pool("mha", "layer_first", page=8), config).__enter__()
    with pytest.raises(UnsupportedSpecError, match="'page_head'"):
        storage("mha", host_pool("mha", "page_head"), config).__enter__()
    with (
        storage("mha", host_pool("mha", "layer_first"), config) as made,
        pytest.raises(UnsupportedSpecError, match="'swa'"),
    ):
        made.register_mem_host_pool_v2(host_pool("mha", "layer_first"), PoolName.SWA)


def test_prefix_hashes_change_nothing_while_pages_are_exact(tmp_path: Path) -> None:
    keys = keys_of(3)
    pool = host_pool("mha", "layer_first")
    with storage("mha", pool, storage_config("mha", tmp_path)) as made:
        written = fill(pool, WRITTEN)
        assert all(made.batch_set_v1(keys[:1], slots(WRITTEN[:1]), info()))
        assert all(made.batch_set_v1(keys[1:], slots(WRITTEN[1:]), info(keys[0])))
        assert made.batch_get_v1(keys, slots(READ)) == [True] * 3
        assert same(pool, READ, written)
