"""Questions with one right answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from kvserve_core.evaluation.engine import plane_by_plane
from kvserve_core.evaluation.questions import DEPTHS, HAYSTACK_TOKENS, Instance, copying, instances, lookup, passkey
from kvserve_core.evaluation.tasks import TaskBench
from kvserve_core.spec import DType, Region
from kvserve_hf.engine import Engine
from tiny_models import VOCAB, make

START = [1]


def tokenize(text: str) -> list[int]:
    """A letter a token, after a token that starts every text."""
    return START + [ord(c) for c in text]


def text_of(ids: Iterable[int]) -> str:
    return "".join(map(chr, ids))


def test_they_are_the_same_each_time_and_balanced() -> None:
    texts = ["hay " * 400, "straw " * 400]
    made = instances(tokenize, texts, 2, seed=3)
    assert made == instances(tokenize, texts, 2, seed=3)
    assert made != instances(tokenize, texts, 2, seed=4)
    counts = {name: [i.task for i in made].count(name) for name in {i.task for i in made}}
    assert counts == {f"passkey-{d:g}": 2 for d in DEPTHS} | {"lookup": 2, "copy": 2}


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_passkey_lies_at_its_depth(depth: float) -> None:
    made = passkey(tokenize, "x" * 2000, depth, random.Random(1))
    assert list(made.prompt[:1]) == START
    assert START[0] not in made.answer
    prompt, answer = text_of(made.prompt[1:]), text_of(made.answer)
    assert prompt.index("\n\nImportant") == int(depth * HAYSTACK_TOKENS)
    assert prompt.count("x") == HAYSTACK_TOKENS
    assert prompt.count(answer) == 2
    assert prompt.endswith("the pass key is")


def test_the_answer_of_a_lookup_is_in_the_table_once() -> None:
    made = lookup(tokenize, random.Random(2))
    prompt, answer = text_of(made.prompt[1:]), text_of(made.answer)
    name = prompt.rsplit("\n", 1)[1]
    assert prompt.count(f"\n{name}") == 2
    assert f"\n{name}{answer}\n" in prompt


def test_a_copy_completes_one_of_the_lines() -> None:
    made = copying(tokenize, random.Random(2))
    lines = text_of(made.prompt[1:]).split("\n")
    full = lines[-1] + text_of(made.answer)
    told, repeated = lines[:8], lines[9:-1]
    assert full in told
    assert repeated == told[: told.index(full)]


def solved_by(engine: Engine, count: int) -> list[Instance]:
    """Questions whose answers are what the model says, and as many that it gets wrong."""
    g = torch.Generator().manual_seed(2)
    out = []
    for i in range(count):
        prompt = torch.randint(3, VOCAB, (40,), generator=g).tolist()
        engine.prefill("p", prompt[:-1])
        said = engine.generate("p", prompt[-1], 3)
        engine.release("p")
        out.append(Instance("easy", tuple(prompt), tuple(said)))
        out.append(Instance("hard", tuple(prompt), (*said[:-1], (said[-1] + 1 + i) % VOCAB)))
    return out


def noisy(scale: float) -> Callable[[Region, Tensor], Tensor]:
    return lambda at, x: (x.float() * (1 + scale * torch.randn(x.shape))).to(x.dtype)


def test_a_task_that_the_model_cannot_do_is_not_counted() -> None:
    engine = make("llama", DType.BF16)
    bench = TaskBench(engine, solved_by(engine, 4))
    assert bench.uncompressed == {"easy": 1.0, "hard": 0.0}
    assert bench.counted == ("easy",)
    assert bench.run(plane_by_plane(engine.spec, lambda at, x: x)) == {"easy": 1.0}
    torch.manual_seed(0)
    assert bench.run(plane_by_plane(engine.spec, noisy(3.0)))["easy"] < 1.0
    assert len(engine.held) == 8
    bench.close()
    assert engine.held == ()
