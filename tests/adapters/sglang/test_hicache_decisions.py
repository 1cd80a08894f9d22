"""How pages are stored follows what reading them takes: the link to the store as configured, then as it was seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hicache_pools import fill, host_pool, keys_of, slots, storage, storage_config

from kvserve_core.policy import Outcome
from kvserve_sglang.hicache_store import link_seconds

WRITTEN, MORE, READ = [5, 3, 9], [11, 12, 13], [20, 40, 21]
LINK = "store:file"


def config(folder: Path, **more: Any) -> Any:
    """With the policy that a deployment has by default."""
    return storage_config("mha", folder, **({"policy": {"name": "analytic"}} | more))


def stored_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.kvframe"))


def total(written: list[torch.Tensor]) -> int:
    return sum(page.nbytes for page in written)


@pytest.mark.parametrize(("store", "others", "smaller"), [("10Mbps", "100Gbps", True), ("100Gbps", "10Mbps", False)])
def test_pages_are_compressed_where_the_stores_own_link_is_slow(
    store: str, others: str, smaller: bool, tmp_path: Path
) -> None:
    pool = host_pool("mha", "layer_first")
    with storage("mha", pool, config(tmp_path, bandwidth=others, priors={LINK: store})) as made:
        written = fill(pool, WRITTEN)
        assert made.batch_set_v1(keys_of(3), slots(WRITTEN)) == [True] * 3
    assert (stored_bytes(tmp_path) < total(written)) is smaller


def test_without_a_prior_of_its_own_the_general_one_counts(tmp_path: Path) -> None:
    pool = host_pool("mha", "layer_first")
    with storage("mha", pool, config(tmp_path, bandwidth="10Mbps")) as made:
        written = fill(pool, WRITTEN)
        assert made.batch_set_v1(keys_of(3), slots(WRITTEN)) == [True] * 3
    assert stored_bytes(tmp_path) < total(written)


def test_a_store_that_reads_slower_than_was_assumed_is_given_less_to_read(tmp_path: Path) -> None:
    slow = {"file": {"path": str(tmp_path), "max_bandwidth": "20Mbps"}}
    pool = host_pool("mha", "layer_first")
    with storage("mha", pool, config(tmp_path, priors={LINK: "100Gbps"}, transport=slow)) as made:
        links = made._cache.deployment.controller.links
        fill(pool, WRITTEN)
        assert made.batch_set_v1(keys_of(3), slots(WRITTEN)) == [True] * 3
        before = stored_bytes(tmp_path)  # raw or lossless: speeds were measured here a moment ago
        assert links.estimate(LINK) == 12.5e9, "what is written says nothing of reading"
        assert made.batch_get_v1(keys_of(3), slots(READ)) == [True] * 3
        assert links.estimate(LINK) < 10e6
        more = total(fill(pool, MORE, seed=2))
        assert made.batch_set_v1(keys_of(3, first=7), slots(MORE)) == [True] * 3
        assert stored_bytes(tmp_path) - before < more


def loaded(transfer_s: float, decode_s: float) -> Outcome:
    return Outcome("page", "", 1, 1, transfer_s=transfer_s, decode_s=decode_s)


def test_seconds_of_a_link_are_those_of_pages_one_by_one_or_shared_by_those_at_once() -> None:
    one_by_one = [loaded(1.0, 0.5), loaded(1.0, 0.5)]
    assert link_seconds(one_by_one, 3.0) == 2.0
    assert link_seconds(one_by_one, 1.5) == 1.0
    assert link_seconds(one_by_one, 30.0) == 2.0, "waiting for something else is not the link's"
    assert link_seconds([], 1.0) == 0.0
    assert link_seconds([loaded(0.0, 0.0)], 0.0) == 0.0
