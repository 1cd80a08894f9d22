"""KV that a real vLLM published, in the hands of a real SGLang: byte for byte, and good enough to go on from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import hicache_servers
import pytest
import servers
import sglang_side
import torch
import vllm_side
from hicache_servers import PAGE
from sglang_side import Planes
from vllm_side import Offered

from kvserve_core.errors import Unacceptable
from kvserve_core.model import kv_spec, model_id
from kvserve_core.spec import DType, KVSpec

LENGTHS = (380, 397, 300)
"""More than a cell of 256 tokens, ending within a block of vLLM's and a page of SGLang's; vLLM offers all tokens but
the last one. The last prompt's offer is left for a test that must not get it."""


@pytest.fixture(scope="module")
def offers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Offered]]:
    source = random.Random(3)
    prompts = [[source.randrange(3, 259) for _ in range(length)] for length in LENGTHS]
    with vllm_side.offering(model, prompts, tmp_path_factory.mktemp("vllm")) as made:
        assert all(len(set(offer.tokens)) > 10 for offer in made), "the model's tokens are degenerate"
        yield made


@pytest.fixture(scope="module")
def kv(model: Path) -> KVSpec:
    return sglang_side.page_spec(sglang_side.served(model), torch.float32)[0]


@pytest.fixture(scope="module")
def fetched(offers: list[Offered], kv: KVSpec) -> list[Planes]:
    return [sglang_side.fetch(kv, offer.params) for offer in offers[:2]]


def test_the_fetched_tensors_equal_those_in_vllms_blocks(offers: list[Offered], fetched: list[Planes]) -> None:
    for offer, planes in zip(offers[:2], fetched, strict=True):
        assert sum(x.numel() for x in offer.cache.values()) == sum(x.numel() for x in planes.values())
        for place, rows in offer.cache.items():
            plane, layer, head, start = place.split("/")
            got = planes[plane][int(layer), int(start) : int(start) + len(rows), int(head)]
            assert torch.equal(got.contiguous().view(torch.int32), rows.view(torch.int32)), place


def test_they_are_the_models_keys_and_values(model: Path, offers: list[Offered], fetched: list[Planes]) -> None:
    """Computed by neither engine: axes, heads and positions are where they belong."""
    from transformers import LlamaForCausalLM

    reference = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    for offer, planes in zip(offers[:2], fetched, strict=True):
        with torch.inference_mode():
            cache = reference(torch.tensor([offer.prompt[:-1]]), use_cache=True).past_key_values
        for layer, wanted in enumerate(cache.layers):
            for plane, x in (("k", wanted.keys), ("v", wanted.values)):
                torch.testing.assert_close(planes[plane][layer].transpose(0, 1), x[0], rtol=1e-3, atol=1e-3)


def test_sglang_goes_on_to_vllms_tokens_and_not_from_zeros(
    model: Path, offers: list[Offered], fetched: list[Planes], tmp_path: Path
) -> None:
    """SGLang computes the last part of a page only; all before it is what vLLM computed."""
    real, control, _ = offers
    stored = sglang_side.put_into_store(model, real.prompt, fetched[0], tmp_path)
    nothing = {name: torch.zeros_like(x) for name, x in fetched[1].items()}
    zeros = sglang_side.put_into_store(model, control.prompt, nothing, tmp_path)
    server = hicache_servers.start(model, tmp_path, "sglang", tmp_path)
    with servers.running(server):
        (tokens, _), restored = hicache_servers.generate(server, real.prompt)
        (wrong, _), restored_zeros = hicache_servers.generate(server, control.prompt)
    assert (restored, restored_zeros) == (stored * PAGE, zeros * PAGE), server.tail()
    assert restored >= 0.9 * len(real.prompt)
    assert tokens == real.tokens
    assert wrong != control.tokens


def test_another_models_cache_is_refused(model: Path, offers: list[Offered], kv: KVSpec) -> None:
    config = sglang_side.served(model).config
    assert kv == kv_spec(config, DType.F32, model_id(model)), "the fingerprint must know no engine"
    other = kv_spec(config, DType.F32, "another model")
    with pytest.raises(Unacceptable, match="different models"):
        sglang_side.fetch(other, offers[2].params)
