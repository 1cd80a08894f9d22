"""What is read from and written into ``kv_transfer_params``."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvserve_core.errors import ConfigError
from kvserve_core.peer import PeerInfo
from kvserve_core.spec import Shard
from kvserve_core.transport import Endpoint, Locator
from kvserve_vllm.options import split_options
from kvserve_vllm.params import TransferParams, answer, description, prompt_digest

LOCATOR = Locator("id", 7, (Endpoint("tcp://h:1", Shard((0, 1))),), "raw")
MANY = msgspec.to_builtins(Locator("id", 7, LOCATOR.endpoints * 129, "raw"))
PEER = PeerInfo((1, 1), {"codec:zstd": (1,)}, "cpu", "f", Shard((0, 1)), frozenset({"a"}), "link")


def request(ids: list[int] | None, lora: str = "", media: tuple[str, ...] = ()) -> Any:
    adapter = SimpleNamespace(lora_name=lora) if lora else None
    features = [SimpleNamespace(identifier=name) for name in media]
    return SimpleNamespace(prompt_token_ids=ids, lora_request=adapter, mm_features=features)


@pytest.mark.parametrize("given", [None, {}, {"remote_host": "x"}, {"do_remote_prefill": True}])
def test_without_our_table_nothing_is_done(given: dict[str, Any] | None) -> None:
    params = TransferParams.parse(given)
    assert (params.offer, params.fetch, params.describe) == (False, False, False)


def test_an_offer_has_an_id_of_its_own_unless_the_router_names_one() -> None:
    first, second = (TransferParams.parse({"do_remote_decode": True}) for _ in range(2))
    assert first.transfer_id != second.transfer_id
    named = TransferParams.parse({"do_remote_decode": True, "kvserve": {"transfer_id": "abc", "slo": "200ms"}})
    assert (named.transfer_id, named.options.slo_s) == ("abc", 0.2)


def test_the_answer_crosses_a_router_as_json() -> None:
    crossed = json.loads(json.dumps(answer(LOCATOR, "d" * 32)))
    params = TransferParams.parse(crossed)
    assert (params.offer, params.fetch) == (False, True)
    assert (params.locator, params.prompt) == (LOCATOR, "d" * 32)


def test_a_description_is_a_peer_for_the_other_side() -> None:
    crossed = json.loads(json.dumps(description(PEER)))
    params = TransferParams.parse({"do_remote_decode": True, "kvserve": {"peer": crossed["kvserve"]["peer"]}})
    assert params.peer == PEER


@pytest.mark.parametrize(
    ("table", "path"),
    [
        ({"locator": 3}, "kv_transfer_params.kvserve.locator"),
        ({"peer": {"wire": "x"}}, "kv_transfer_params.kvserve.peer"),
        ({"transfer_id": 3}, "kv_transfer_params.kvserve.transfer_id"),
        ({"min_quality": 7}, "min_quality"),
        ({"slo": "48h"}, "slo"),
        ({"slo": "1e300s"}, "slo"),
        ("text", "kv_transfer_params.kvserve"),
        ({"locator": MANY}, "kv_transfer_params.kvserve.locator"),
    ],
)
def test_what_is_wrong_is_named(table: Any, path: str) -> None:
    with pytest.raises(ConfigError) as error:
        TransferParams.parse({"do_remote_prefill": True, "kvserve": table})
    assert error.value.path == path


@pytest.mark.parametrize("given", ["text", [1], 7])
def test_params_that_are_no_table_are_named(given: Any) -> None:
    with pytest.raises(ConfigError, match="kv_transfer_params: must be a table"):
        TransferParams.parse(given)


def test_words_for_true_are_not_true() -> None:
    params = TransferParams.parse(
        {"do_remote_decode": "false", "do_remote_prefill": "no", "kvserve": {"describe": "no"}}
    )
    assert (params.offer, params.fetch, params.describe) == (False, False, False)


def test_a_digest_tells_prompts_adapters_and_images_apart() -> None:
    given = [request([1, 2]), request([1, 3]), request([1, 2], "a"), request([1, 2], media=("m",))]
    assert len({prompt_digest(r) for r in given}) == len(given)
    assert prompt_digest(request([1, 2])) == prompt_digest(given[0])
    assert prompt_digest(request(None)) is None


def test_the_adapters_options_are_kept_from_the_settings() -> None:
    options, settings = split_options({"sync_load": True, "slo": "1s"})
    assert options.sync_load
    assert settings == {"slo": "1s"}
    assert split_options(None)[1] == {}
    with pytest.raises(ConfigError, match=r"sync_load: must be true or false, got 'yes'"):
        split_options({"sync_load": "yes"})


def test_a_locator_is_plain_json() -> None:
    assert json.loads(msgspec.json.encode(LOCATOR))["transfer_id"] == "id"
