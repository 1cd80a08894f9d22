"""What a store holds of a prompt at which class, and whether loading pays: without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from controller_cases import library, profile
from fake_engine import dense
from kvserve_core.deployment import Deployment
from kvserve_core.errors import TransportError, UnsupportedSpecError
from kvserve_core.prefix import stored_key
from kvserve_core.requests import RequestOptions
from kvserve_core.settings import Settings
from kvserve_core.spec import Shard
from kvserve_vllm.prefix import lookup
from kvserve_vllm.prefix.keys import check_prefixes, kv_scales, prompt_keys
from kvserve_vllm.prefix.lookup import Hit, Index, Prices, names_of
from kvserve_vllm.spec import ServedModel

KEYS = (("a0", "a1", "a2"), ("b0", "b1", "b2"))
KV = dense()


class Held:
    """A store as far as a lookup sees it. down: it does not answer."""

    def __init__(self, *names: str) -> None:
        self.names, self.down, self.asked = set(names), False, 0

    def contains(self, keys: Sequence[str]) -> int:
        self.asked += 1
        if self.down:
            raise TransportError("no route")
        return next((n for n, key in enumerate(keys) if key not in self.names), len(keys))


def index(*names: str) -> Any:
    return Index(Held(*names))  # type: ignore[arg-type]  # a lookup needs nothing else of a store


def both(cell: int, quality: float) -> list[str]:
    return list(names_of(KEYS, cell, quality))


def test_a_cell_is_there_when_every_rank_has_it() -> None:
    held = [*both(0, 1.0), stored_key("a1", 1.0)]
    assert index(*held).cells(KEYS, 0, (1.0,)) == {0: 1.0}
    assert index(*held, stored_key("b1", 1.0)).cells(KEYS, 0, (1.0,)) == {0: 1.0, 1: 1.0}


def test_better_classes_serve_first_and_worse_ones_go_on() -> None:
    held = [*both(0, 0.99), *both(1, 1.0), *both(1, 0.99), *both(2, 0.98)]
    found = index(*held).cells(KEYS, 0, (1.0, 0.99))
    assert found == {0: 0.99, 1: 0.99}
    assert index(*held).cells(KEYS, 1, (1.0, 0.99)) == {1: 1.0}
    assert index(*held).cells(KEYS, 0, (1.0,)) == {}


def test_a_better_cell_makes_a_worse_one_needless() -> None:
    held = index(*both(1, 0.99))
    assert held.holds(KEYS, 1, 0.98)
    assert held.holds(KEYS, 1, 0.99)
    assert not held.holds(KEYS, 1, 1.0)


def test_a_store_that_does_not_answer_holds_nothing_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    held = Held(*both(0, 1.0))
    asked = Index(held)  # type: ignore[arg-type]  # as above
    held.down = True
    assert asked.cells(KEYS, 0, (1.0,)) == {}
    assert not asked.holds(KEYS, 0, 1.0)
    assert len(caplog.records) == 1
    held.down = False
    assert asked.cells(KEYS, 0, (1.0,)) == {0: 1.0}


def test_cells_that_cannot_be_decoded_here_are_not_asked_for_again_but_stay_stored() -> None:
    asked = index(*both(0, 0.99), *both(1, 0.99), *both(0, 0.98))
    asked.unreadable(both(0, 0.99))
    assert asked.cells(KEYS, 0, (1.0, 0.99)) == {}
    assert asked.cells(KEYS, 0, (1.0, 0.99, 0.98)) == {0: 0.98, 1: 0.99}
    assert asked.holds(KEYS, 0, 0.99)


def test_names_that_cannot_be_decoded_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "MAX_UNREADABLE", 2)
    asked = index(*both(0, 0.99))
    asked.unreadable([*both(0, 0.99), "x", "y"])
    assert asked.cells(KEYS, 0, (0.99,)) == {0: 0.99}


def test_a_hit_is_as_good_as_its_worst_cell() -> None:
    hit = Hit({}, {1: 1.0, 2: 0.99, 3: 1.0}, 1024)
    assert (hit.quality, hit.first_lossy) == (0.99, 512)
    assert Hit({}, {0: 1.0}, 256).first_lossy is None


def prices() -> tuple[Prices, Deployment]:
    deployment = Deployment(Settings(), KV)
    return Prices(deployment, "store:x"), deployment


def test_loading_is_weighed_against_computing() -> None:
    asked, deployment = prices()
    options = RequestOptions()
    assert asked.pays(options, 1024, 1.0)[0]  # nothing is known of prefill yet
    deployment.controller.observe_prefill(1000, 1.0)
    assert asked.pays(options, 1024, 1.0)[0]
    for _ in range(20):
        deployment.controller.links.observe("store:x", 1_000_000, 10.0)
    nbytes = 1024 * KV.token_bytes()
    assert nbytes / 100_000 > 1024 / 1000
    assert not asked.pays(options, 1024, 1.0)[0]


def test_what_is_stored_is_of_the_class_of_its_profile_and_of_what_came_before() -> None:
    asked, _ = prices()
    assert asked.stored_class("raw", 1.0) == 1.0
    assert asked.stored_class("lossless", 0.99) == 0.99
    assert asked.floor(RequestOptions(min_quality=0.97)) == 0.98
    assert asked.floor(RequestOptions(min_quality=1.0)) == 1.0
    assert asked.choose(RequestOptions(), 1024, 1.0).profile == "raw"  # all that is acceptable so far


def test_a_lossy_profile_that_lost_nothing_measurable_is_not_stored_as_exact(tmp_path: Path) -> None:
    made = library(profile("perfect", 4.0, 1e9, lower=1.0), fingerprint=KV.fingerprint)
    made.save(tmp_path / "m.kvlib")
    deployment = Deployment.load(Settings(library=tmp_path / "m.kvlib"), KV)
    asked = Prices(deployment, "store:x")
    assert asked.quality("perfect") == 1.0
    assert asked.stored_class("perfect", 1.0) == 0.999
    assert asked.stored_class("lossless", 1.0) == 1.0
    asked.acceptable = frozenset({"raw", "perfect"})
    assert asked.choose(RequestOptions(min_quality=1.0), 1024, 1.0).profile == "raw"


def request(tokens: list[int] | None, **fields: Any) -> Any:
    plain = {"prompt_token_ids": tokens, "lora_request": None, "cache_salt": None, "mm_features": []}
    return SimpleNamespace(**(plain | fields))


def image(name: str, offset: int) -> Any:
    return SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset))


def keys(given: Any, scales: str | None = None, shard: Shard | None = None) -> tuple[str, ...]:
    made = prompt_keys(given, KV, [shard or Shard((0, 1, 2, 3))], [scales])
    assert made is not None
    return made[0]


def test_keys_depend_on_all_that_the_values_do() -> None:
    tokens = list(range(600))
    plain = keys(request(tokens))
    assert len(plain) == 2
    others = [
        keys(request(tokens), "scales"),
        keys(request(tokens), shard=Shard((0, 1, 2, 3), 1, 2)),
        keys(request(tokens, cache_salt="s")),
        keys(request(tokens, lora_request=SimpleNamespace(lora_name="l"))),
        keys(request(tokens, mm_features=[image("i", 3)])),
        keys(request(tokens, mm_features=[image("j", 3)])),
        keys(request([9, *tokens[1:]])),
    ]
    assert len({plain, *others}) == 1 + len(others)
    assert all(set(plain).isdisjoint(other) for other in others)
    late = keys(request(tokens, mm_features=[image("i", 300)]))
    assert late[0] == plain[0]
    assert late[1] != plain[1]
    assert prompt_keys(request(None), KV, [Shard((0, 1, 2, 3))], [None]) is None


def test_scales_of_quantized_layers_are_told_apart() -> None:
    layer = SimpleNamespace(name="l.0", layer=0, is_state=False, is_packed=True)
    plain = SimpleNamespace(name="l.1", layer=1, is_state=False, is_packed=False)

    def digest(scale: float, layers: Sequence[Any]) -> str | None:
        module = SimpleNamespace(_k_scale=torch.tensor(scale), _v_scale=torch.tensor(1.0))
        return kv_scales(layers, {"l.0": module, "l.1": module})

    assert digest(1.0, [plain]) is None
    assert digest(1.0, [layer]) == digest(1.0, [layer, plain])
    assert digest(1.0, [layer]) != digest(2.0, [layer])


def test_models_whose_prefixes_cannot_be_kept_are_refused_with_the_reason() -> None:
    windowed = SimpleNamespace(name="l.0", layer=0, spec=object(), is_packed=True)
    layers: Any = (windowed,)
    with pytest.raises(UnsupportedSpecError, match="'--disable-hybrid-kv-cache-manager'"):
        check_prefixes(ServedModel(dense(window=64), layers, 1, 1, 1), SimpleNamespace())
    with pytest.raises(UnsupportedSpecError, match="'--block-size'"):
        check_prefixes(ServedModel(KV, (), 1, 1, 96), SimpleNamespace())
    with pytest.raises(UnsupportedSpecError, match="calculate-kv-scales"):
        check_prefixes(ServedModel(KV, layers, 1, 1, 1), SimpleNamespace(calculate_kv_scales=True))
    check_prefixes(ServedModel(KV, layers, 1, 1, 1), SimpleNamespace())
