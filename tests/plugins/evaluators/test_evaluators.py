"""Evaluators on a tiny model: nothing lost is 1, noise is less, and only prompt KV goes through the roundtrip."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvserve_core.errors import ConfigError
from kvserve_core.evaluation.engine import Text, plane_by_plane
from kvserve_core.evaluation.questions import Instance
from kvserve_core.evaluation.sampling import unresolved
from kvserve_core.evaluator import Evaluator, Prepared
from kvserve_core.registry import default_registry
from kvserve_core.spec import DType, Region
from kvserve_hf.engine import Engine
from kvserve_plugins.evaluators import copy_lookup, passkey
from tiny_models import VOCAB, make

LETTERS = "abcdefghijklmnopqrstuvwxyz 0123456789.,:;\n?"


@pytest.fixture(params=["llama", "gemma"])
def engine(request: pytest.FixtureRequest) -> Engine:
    made = make(request.param, DType.BF16)
    made.tokenize = lambda text, chat=False: [1, *(3 + LETTERS.find(c.lower()) % VOCAB for c in text)]  # type: ignore[method-assign]  # a model without a tokenizer
    return made


def create(name: str, **configuration: Any) -> Evaluator:
    made: Evaluator = default_registry().create("evaluator", {"name": name, "configuration": configuration})  # type: ignore[arg-type]  # the registry takes the JSON form
    return made


def texts(count: int = 4) -> list[Text]:
    g = torch.Generator().manual_seed(5)
    draw = (torch.randint(0, len(LETTERS), (80,), generator=g).tolist() for _ in range(count))
    return [Text(f"t{i}", ("prose", "code")[i % 2], "".join(LETTERS[j] for j in row)) for i, row in enumerate(draw)]


def noisy(scale: float) -> Callable[[Region, Tensor], Tensor]:
    g = torch.Generator().manual_seed(0)
    return lambda at, x: (x.float() * (1 + scale * torch.randn(x.shape, generator=g))).to(x.dtype)


def same(at: Region, x: Tensor) -> Tensor:
    return x


CONTINUATION = {"prompt_tokens": 50, "continuation_tokens": 12}


def test_continuations_lose_nothing_without_a_loss_and_more_with_more_noise(engine: Engine) -> None:
    prepared = create("continuation", **CONTINUATION).prepare(engine, texts())
    exact = prepared.run(plane_by_plane(engine.spec, same))
    assert exact.quality.mean == pytest.approx(1.0, abs=1e-6)
    assert exact.metrics["top1"].mean == 1.0
    some, much = (prepared.run(plane_by_plane(engine.spec, noisy(s))) for s in (0.1, 1.0))
    assert 1.0 > some.quality.mean > much.quality.mean > 0.0
    assert some.quality.low < some.quality.mean < some.quality.high <= 1.0
    prepared.close()
    assert engine.held == ()


def test_continuations_are_reported_by_kind_and_a_single_text_leaves_the_bound_open(engine: Engine) -> None:
    prepared = create("continuation", **CONTINUATION).prepare(engine, texts(3))
    found = prepared.run(plane_by_plane(engine.spec, noisy(0.3)))
    prepared.close()
    assert {kind: s.samples for kind, s in found.by_kind.items()} == {"prose": 2, "code": 1}
    assert found.by_kind["code"].quality.low == 0.0
    assert "3 samples" in unresolved(found.quality, found.samples, 1e-6)


def test_the_quick_variant_draws_fewer_texts_evenly_over_kinds(engine: Engine) -> None:
    whole = create("continuation")
    quick = whole.quick(2)
    assert isinstance(quick, type(whole))
    # shorter texts would be another measure: the loss is largest right after the prompt
    assert quick.config == whole.config.model_copy(update={"samples": 2})
    assert create("passkey", samples=8).quick(3).config.samples == 3  # type: ignore[attr-defined]  # of its own class
    assert create("passkey", samples=2).quick(3).config.samples == 2  # type: ignore[attr-defined]  # of its own class
    few = create("continuation", **CONTINUATION).quick(2).prepare(engine, texts(6))
    assert set(few.run(plane_by_plane(engine.spec, same)).by_kind) == {"prose", "code"}
    few.close()


def test_no_texts_are_refused(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="texts"):
        create("continuation").prepare(engine, [])
    with pytest.raises(ConfigError, match="texts"):
        create("passkey").prepare(engine, [])


def solvable(engine: Engine, task: str, count: int, answer: int) -> list[Instance]:
    """Questions whose answers are what the model says anyway, and one in four that it gets wrong."""
    g = torch.Generator().manual_seed(2)
    out = []
    for i in range(count):
        prompt = torch.randint(3, VOCAB, (40,), generator=g).tolist()
        engine.prefill("p", prompt[:-1])
        said = engine.generate("p", prompt[-1], answer)
        engine.release("p")
        wrong = [(said[0] + 1) % VOCAB, *said[1:]] if i % 4 == 3 else said
        out.append(Instance(task, tuple(prompt), tuple(wrong)))
    return out


def asked(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, given: list[Instance]) -> None:
    """Questions that a random model can answer stand in for the real ones."""
    monkeypatch.setattr(module, name, lambda *_: given)


def both(prepared: Prepared, engine: Engine) -> tuple[Any, Any]:
    found = [prepared.run(plane_by_plane(engine.spec, change)) for change in (same, noisy(3.0))]
    prepared.close()
    assert engine.held == ()
    return found[0], found[1]


def test_passkeys_count_what_the_uncompressed_model_answers(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    given = solvable(engine, "passkey-0.5", 8, 2)
    asked(monkeypatch, passkey, "passkeys", given)
    exact, lossy = both(create("passkey").prepare(engine, texts()), engine)
    assert (exact.quality.mean, exact.samples) == (1.0, 6)
    assert exact.quality.low < 1.0
    assert lossy.quality.mean < 0.5
    assert set(lossy.metrics) == {"passkey-0.5"}


def test_copies_must_agree_token_by_token_beyond_the_answer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [*solvable(engine, "copy", 4, 2), *solvable(engine, "lookup", 4, 2)]
    asked(monkeypatch, copy_lookup, "copies_and_lookups", given)
    exact, lossy = both(create("copy_lookup", tokens=8).prepare(engine, []), engine)
    assert (exact.quality.mean, exact.samples) == (1.0, 8)
    assert set(exact.metrics) == {"copy", "lookup"}
    assert lossy.quality.mean < 0.5


def test_tasks_that_the_model_cannot_do_are_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = [Instance(i.task, i.prompt, ((i.answer[0] + 1) % VOCAB,)) for i in solvable(engine, "hard", 3, 1)]
    asked(monkeypatch, passkey, "passkeys", wrong)
    with pytest.raises(ConfigError, match=r"hard 0\.00"):
        create("passkey").prepare(engine, texts())
    assert engine.held == ()


def test_a_copy_task_that_is_not_solved_is_left_out(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = [Instance("copy", i.prompt, ((i.answer[0] + 1) % VOCAB,)) for i in solvable(engine, "copy", 3, 1)]
    asked(monkeypatch, copy_lookup, "copies_and_lookups", [*wrong, *solvable(engine, "lookup", 3, 1)])
    prepared = create("copy_lookup", tokens=4).prepare(engine, [])
    assert set(prepared.run(plane_by_plane(engine.spec, same)).metrics) == {"lookup"}
    prepared.close()
    asked(monkeypatch, copy_lookup, "copies_and_lookups", wrong)
    with pytest.raises(ConfigError, match=r"copy 0\.00"):
        create("copy_lookup", tokens=4).prepare(engine, [])
    assert engine.held == ()


def test_only_the_prompt_goes_through_the_roundtrip(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked(monkeypatch, copy_lookup, "copies_and_lookups", solvable(engine, "copy", 2, 1))
    prepared = create("copy_lookup", tokens=6).prepare(engine, [])
    lengths: list[int] = []

    def counted(read: Callable[[Region], Tensor], total: int) -> Iterable[tuple[Region, Tensor]]:
        lengths.append(total)
        return plane_by_plane(engine.spec, same)(read, total)

    prepared.run(counted)
    prepared.close()
    assert lengths == [39, 39]
