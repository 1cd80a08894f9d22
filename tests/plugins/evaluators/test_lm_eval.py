"""The harness for real, on tasks in local files; nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is an extra: pip install 'kvserve[lm-eval]'")

from kvserve_core.errors import ConfigError
from kvserve_core.evaluation.engine import plane_by_plane
from kvserve_core.evaluator import Prepared
from kvserve_core.registry import default_registry
from kvserve_core.spec import DType
from kvserve_hf.engine import Engine
from tiny_models import VOCAB, make

CHOICE = """
task: kvserve_choice
dataset_path: json
dataset_kwargs: {data_files: {test: "%s"}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""
GENERATE = """
task: kvserve_generate
dataset_path: json
dataset_kwargs: {data_files: {test: "%s"}}
output_type: generate_until
test_split: test
doc_to_text: "{{text}}"
doc_to_target: "{{said}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 4}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""
ROLLING = CHOICE.replace("kvserve_choice", "kvserve_rolling").replace("multiple_choice", "loglikelihood_rolling")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the harness and of datasets, on import and use
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # datasets leaves files for the garbage collector
]


@pytest.fixture
def engine() -> Engine:
    made = make("llama", DType.BF16)
    made.tokenize = lambda text, chat=False: [1, *(3 + ord(c) % (VOCAB - 3) for c in text)]  # type: ignore[method-assign]  # a model without a tokenizer
    made.detokenize = lambda ids: "".join(chr(97 + i % 26) for i in ids)  # type: ignore[method-assign]  # likewise
    return made


@pytest.fixture
def tasks(tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Questions whose answers are what the model itself prefers, so that it can do them."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    g = torch.Generator().manual_seed(4)
    rows = []
    for _ in range(8):
        text = "".join(chr(97 + int(i)) for i in torch.randint(0, 26, (30,), generator=g))
        ids = engine.tokenize(text)
        engine.prefill("p", ids[:-1])
        likely = engine.teacher_forced("p", ids[-1:])[0]
        said = engine.detokenize(engine.generate("p", ids[-1], 4))
        engine.release("p")
        letters = sorted("abcdefgh", key=lambda c: -float(likely[3 + ord(c) % (VOCAB - 3)]))
        rows.append({"text": text, "choices": [letters[0], letters[3], letters[7]], "answer": 0, "said": said})
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("choice", CHOICE), ("generate", GENERATE), ("rolling", ROLLING)):
        (tmp_path / f"{name}.yaml").write_text(text % data)
    return tmp_path


def prepare(engine: Engine, folder: Path, *names: str, **more: Any) -> Prepared:
    configuration = {"tasks": names, "include_path": str(folder), **more}
    made: Prepared = (
        default_registry().create("evaluator", {"name": "lm_eval", "configuration": configuration}).prepare(engine, [])  # type: ignore[arg-type]  # the registry takes the JSON form
    )
    return made


def test_choices_and_generation_lose_nothing_without_a_loss_and_much_with_noise(engine: Engine, tasks: Path) -> None:
    prepared = prepare(engine, tasks, "kvserve_choice", "kvserve_generate")
    exact = prepared.run(plane_by_plane(engine.spec, lambda at, x: x))
    assert (exact.quality.mean, exact.samples) == (1.0, 16)
    assert set(exact.metrics) == {"kvserve_choice", "kvserve_generate"}
    g = torch.Generator().manual_seed(0)
    lossy = prepared.run(
        plane_by_plane(engine.spec, lambda at, x: (x.float() + 3 * torch.randn(x.shape, generator=g)).to(x.dtype))
    )
    assert lossy.quality.mean < 0.7
    assert lossy.quality.low < lossy.quality.mean < lossy.quality.high
    prepared.close()
    assert engine.held == ()


def test_samples_are_the_same_documents_for_every_pipeline(engine: Engine, tasks: Path) -> None:
    prepared = prepare(engine, tasks, "kvserve_choice", samples=3)
    assert prepared.run(plane_by_plane(engine.spec, lambda at, x: x)).samples == 3
    prepared.close()


def test_what_cannot_judge_is_refused(engine: Engine, tasks: Path) -> None:
    with pytest.raises(ConfigError, match="knows no task 'kvserve_choise'"):
        prepare(engine, tasks, "kvserve_choise")
    with pytest.raises(ConfigError, match="no metric 'loss'"):
        prepare(engine, tasks, "kvserve_choice", metric="loss")
    with pytest.raises(ConfigError, match="without a prompt"):
        prepare(engine, tasks, "kvserve_rolling")
    assert engine.held == ()
