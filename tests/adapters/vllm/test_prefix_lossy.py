"""Prefixes stored with loss: who may have them, and what becomes of what is computed after them."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from kvserve_hf.convert import smollm2
from kvserve_hf.texts import load_text, pinned_texts
from vllm_engines import EngineProcess, external_tokens, forget, generate
from vllm_prefixes import CELL, nothing_held, untimed

Start = Callable[..., EngineProcess]
PROFILE, TOP = "klt-0.3", 50
STRICT = {"kvserve": {"min_quality": 1.0}}
pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lossy")


@pytest.fixture(scope="module")
def engine(start: Start, store: Path) -> EngineProcess:
    extra = {
        "library": str(files("kvserve_hf").joinpath("smollm2-135m.kvlib")),
        "policy": {"name": "static", "configuration": {"profile": PROFILE}},
        "min_quality": 0.99,
        "prefix_store": "file",
        "transport": {"file": {"path": str(store)}},
        "peers": {"accept": "any"},
    }
    llm = {"dtype": "bfloat16", "max_model_len": 2048, "max_logprobs": TOP}
    return start(smollm2(), "kv_both", extra=extra, llm=llm)


@pytest.fixture(scope="module")
def text() -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2(), local_files_only=True)
    words = load_text(next(iter(pinned_texts())), allow_unpinned=True).text
    return list(tokenizer(words)["input_ids"][: 4 * CELL])


def asked(engine: EngineProcess, prompt: list[int], params: Any = None) -> tuple[dict[int, float], int]:
    """What comes next, and how many prompt tokens came from outside."""
    engine.call(untimed)
    before = engine.call(external_tokens)
    answer = engine.call(generate, [prompt], 1, [params], TOP)[0]
    assert engine.call(nothing_held)
    return answer.logprobs[0], engine.call(external_tokens) - before


def count(store: Path) -> int:
    return len(list(store.glob("*.kvframe")))


def test_only_requests_that_take_the_loss_are_served_from_lossy_cells(
    engine: EngineProcess, text: list[int], store: Path
) -> None:
    prompt = text[: 2 * CELL + 40]
    exact, external = asked(engine, prompt)
    assert (external, count(store)) == (0, 2)
    assert engine.call(forget)
    lossy, external = asked(engine, prompt)
    assert external == 2 * CELL
    assert lossy != exact
    again, external = asked(engine, prompt, STRICT)  # the cache was not emptied: forbidden is the default
    assert (again, external, count(store)) == (exact, 0, 4)  # and it stored exact cells of its own
    assert engine.call(forget)
    best, external = asked(engine, prompt)
    assert (best, external) == (exact, 2 * CELL)  # better cells serve everybody


def test_what_is_computed_after_lossy_cells_is_not_stored_as_better(
    engine: EngineProcess, text: list[int], store: Path
) -> None:
    first = [*text[7 : CELL + 7], 11]
    asked(engine, first)
    assert engine.call(forget)
    stored = count(store)
    longer = [*first[:CELL], *text[: CELL + 5]]
    _, external = asked(engine, longer)
    assert (external, count(store)) == (CELL, stored + 1)
    assert engine.call(forget)
    _, external = asked(engine, longer)
    assert external == 2 * CELL  # of the same class: encoded without further loss
    assert engine.call(forget)
    _, external = asked(engine, longer, STRICT)
    assert external == 0
