"""Pages stored with loss: only where the operator allows it, by class, and never passed on as exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hicache_pools import PAGE, fill, host_pool, info, keys_of, slots, storage, storage_config
from inprocess import MHA

from kvserve_core.latency import Speed
from kvserve_core.library import Profile, ProfileLibrary, QualityRecord
from kvserve_core.profile import PipelineSpec
from kvserve_sglang.hicache_quality import Held
from kvserve_sglang.spec import model_spec

LOSSY = "u32"
RECORD = QualityRecord(value=0.995, lower=0.993, upper=0.997, metric="exp(-KL)", samples=9)
WRITTEN, READ = [5, 3, 9], [20, 40, 21]


@pytest.fixture
def library(tmp_path: Path) -> Path:
    chain = {"quantizer": {"name": "uniform", "configuration": {"levels": 32}}, "codec": "zstd"}
    spec = PipelineSpec.parse({"planes": {"*": chain}})
    speed = Speed.of(1e9)
    profile = Profile(name=LOSSY, pipeline=spec, cr=3, encode=speed, decode=speed, quality={"default": RECORD})
    kv = model_spec(MHA, torch.bfloat16, "tiny", None)
    made = ProfileLibrary(
        model_id=kv.model_id, fingerprint=kv.fingerprint, device="cpu", created="2026-01-01", profiles=(profile,)
    )
    made.save(tmp_path / "tiny.kvlib")
    return tmp_path / "tiny.kvlib"


def config(folder: Path, library: Path, profile: str = LOSSY, **more: Any) -> Any:
    policy = {"name": "static", "configuration": {"profile": profile}}
    given = {"library": str(library), "policy": policy, "min_quality": 0.98, "lossy_prefix_cache": "allow", **more}
    return storage_config("mha", folder, **given)


def read(pool: Any, pages: list[int]) -> torch.Tensor:
    return torch.stack([pool.get_data_page(page * PAGE) for page in pages]).float()


def test_lossy_pages_go_by_their_place_in_the_prompt_and_to_servers_that_take_loss(
    tmp_path: Path, library: Path
) -> None:
    keys, folder = keys_of(3), tmp_path / "store"
    pool = host_pool("mha", "layer_first")
    with storage("mha", pool, config(folder, library)) as made:
        written = torch.stack(fill(pool, WRITTEN)).float()
        assert made.batch_set_v1(keys[:1], slots(WRITTEN[:1]), info()) == [True]
        assert made.batch_set_v1(keys[1:], slots(WRITTEN[1:]), info(keys[0])) == [True, True]
    assert sum(f.stat().st_size for f in folder.glob("*.kvframe")) < 0.7 * written.numel() * 2
    with storage("mha", pool, config(folder, library)) as made:
        assert made.batch_exists(keys, info()) == 3
        assert made.batch_exists(keys[1:], info(keys[0])) == 2
        assert made.batch_exists(keys) == 0, "what cannot be loaded is not there"
        assert made.batch_get_v1(keys, slots(READ)) == [False] * 3, "no place in the prompt is known"
        assert made.batch_get_v1(keys[1:], slots(READ[1:]), info(keys[0])) == [True, True]
        assert made.batch_get_v1(keys[:1], slots(READ[:1]), info()) == [True]
        error = (read(pool, READ) - written).abs()
        assert 0 < error.max() < 0.3
    for strict in ({"lossy_prefix_cache": "forbid"}, {"min_quality": 0.995}):
        with storage("mha", pool, config(folder, library, **strict)) as made:
            assert made.batch_exists(keys, info()) == 0


def test_without_prefix_hashes_or_the_operators_word_pages_are_exact(tmp_path: Path, library: Path) -> None:
    keys = keys_of(1)
    pool = host_pool("mha", "layer_first")
    for name, given, prefix in (("a", {}, None), ("b", {"lossy_prefix_cache": "forbid"}, info())):
        with storage("mha", pool, config(tmp_path / name, library, **given)) as made:
            written = torch.stack(fill(pool, WRITTEN[:1])).float()
            assert made.batch_set_v1(keys, slots(WRITTEN[:1]), prefix) == [True]
            assert made.batch_get_v1(keys, slots(READ[:1])) == [True]
            assert torch.equal(read(pool, READ[:1]), written)


def test_what_is_computed_after_lossy_pages_is_not_stored_as_exact(tmp_path: Path, library: Path) -> None:
    keys, folder = keys_of(3), tmp_path / "store"
    pool = host_pool("mha", "layer_first")
    with storage("mha", pool, config(folder, library)) as made:
        fill(pool, WRITTEN)
        assert made.batch_set_v1(keys[:1], slots(WRITTEN[:1]), info()) == [True]
    with storage("mha", pool, config(folder, library, profile="lossless")) as made:
        assert made.batch_get_v1(keys[:1], slots(READ[:1]), info()) == [True]
        assert made.batch_set_v1(keys[:1], slots(READ[:1]), info()) == [True], "it is there, as what it is"
        assert made.batch_set_v1(keys[1:2], slots(WRITTEN[1:2]), info(keys[0])) == [True]
        assert made.batch_set_v1(keys[2:], slots(WRITTEN[2:])) == [False], "it may have been computed after them"
        assert made.batch_exists(keys, info()) == 2
        assert made.batch_set_v1(keys_of(1, first=9), slots([7]), info()) == [True], "it was not"
    with storage("mha", pool, config(folder, library, lossy_prefix_cache="forbid")) as made:
        assert [made.batch_exists([key], info()) for key in keys] == [0] * 3
        assert made.batch_exists(keys_of(1, first=9)) == 1


def test_of_several_ranks_none_calls_exact_what_another_may_have_loaded_with_loss(
    tmp_path: Path, library: Path
) -> None:
    keys, folder = keys_of(2), tmp_path / "store"
    pool = host_pool("mha", "layer_first", ranks=2)

    def rank(**more: Any) -> Any:
        return replace(config(folder, library, profile="lossless", **more), tp_size=2)

    with storage("mha", pool, rank()) as made:
        fill(pool, WRITTEN)
        assert made.batch_set_v1(keys[:1], slots(WRITTEN[:1]), info()) == [True]
        assert made.batch_get_v1(keys[:1], slots(READ[:1]), info()) == [True]
        assert made.batch_set_v1(keys[1:], slots(WRITTEN[1:2]), info(keys[0])) == [True]
        assert made.batch_exists(keys, info()) == 2
    with storage("mha", pool, rank(lossy_prefix_cache="forbid")) as made:
        assert made.batch_exists(keys, info()) == 1


def test_quality_is_that_of_the_worst_page_before_and_the_worst_of_all_where_nobody_knows() -> None:
    held = Held()
    assert held.of(None) == held.of(["a"]) == 1.0
    held.loaded(["a"], 0.99)
    held.loaded(["b"], 0.98)
    assert [held.of(prefix) for prefix in (["a"], ["a", "b", "c"], ["c"], [], None)] == [0.99, 0.98, 1.0, 1.0, 0.98]
    held.loaded(["a"], 1.0)
    assert held.of(["a"]) == 1.0
