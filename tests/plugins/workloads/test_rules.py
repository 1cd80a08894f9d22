"""Prompts and real texts of installed packages, told apart."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import mpmath.function_docs
import pytest

from kvserve_core.errors import ConfigError
from kvserve_core.registry import default_registry
from kvserve_core.workload import CLASSES, WorkloadClassifier, workload_of
from kvserve_hf.texts import (
    LoadedText,
    PinnedText,
    PinnedTextError,
    demo_prompts,
    domain_texts,
    load_texts,
    pinned_texts,
)
from kvserve_plugins.workloads import rules
from kvserve_plugins.workloads.rules import code_share, maths_density

PROMPTS = [
    ("What is the capital of France?", "chat"),
    ("Hi! Can you recommend a good book about sailing?", "chat"),
    ("Explain why the sky is blue, in two sentences.", "chat"),
    ("Write a Python function that reverses a list.", "code"),
    ("```\nfor i in range(3):\n    print(i)\n```", "code"),
    ("Solve x^2 - 5x + 6 = 0.", "maths"),
    ("Prove that sqrt(2) is irrational.", "maths"),
    ("A train travels 120 km in 2 hours and 30 km in 1 hour. How many km does it travel in all?", "maths"),
    (r"What is $\int_0^1 x^2 dx$?", "maths"),
    ("", "chat"),
]


def loaded(pins: Sequence[PinnedText]) -> list[LoadedText]:
    try:
        return load_texts(pins)
    except PinnedTextError as error:
        pytest.skip(f"needs the packages of the pinned texts: {error}")


def classifier(**configuration: object) -> WorkloadClassifier:
    spec = {"name": "rules", "configuration": configuration}
    made: WorkloadClassifier = default_registry().create("workload", spec)  # type: ignore[arg-type]  # the registry takes the JSON form
    return made


@pytest.mark.parametrize(("prompt", "wanted"), PROMPTS)
def test_short_prompts(prompt: str, wanted: str) -> None:
    assert classifier().classify(prompt) == wanted


def test_source_files_are_code() -> None:
    texts = [t for t in loaded(pinned_texts()) if t.pin.kind == "code"] + loaded(domain_texts("humaneval"))
    assert {t.pin.name: classifier().classify(t.text) for t in texts} == {t.pin.name: "code" for t in texts}


def test_manuals_and_licences_are_documents_with_or_without_a_question() -> None:
    texts = loaded([*domain_texts("manual"), *domain_texts("licence")])
    for text in texts:
        assert classifier().classify(text.text) == "document"
        assert classifier().classify(f"{text.text}\n\nQuestion: what does the second part say?") == "document"


def test_readme_files_are_documents_unless_most_of_them_is_code() -> None:
    texts = [t for t in loaded(pinned_texts()) if t.pin.kind == "prose"]
    found = {t.pin.name: (classifier().classify(t.text), code_share(t.text)) for t in texts}
    assert sum(name == "document" for name, _ in found.values()) >= 5
    assert all(name == "document" or share >= 0.5 for name, share in found.values())


@pytest.mark.parametrize("name", ["gamma", "zeta", "ellipk", "hyp2f1", "besselj", "erf", "polylog"])
def test_the_documentation_of_functions_is_maths(name: str) -> None:
    text = inspect.cleandoc(getattr(mpmath.function_docs, name))
    assert classifier().classify(text) == "maths"
    assert maths_density(text) > 4


def test_the_demo_s_prompts_are_what_they_are_called() -> None:
    found = {prompt.name: classifier().classify(prompt.text) for prompt in demo_prompts()}
    assert found == {"document": "document", "code": "code", "question": "chat"}


def test_a_library_may_call_the_classes_otherwise() -> None:
    assert classifier(names={"chat": "default"}).classify("Good morning") == "default"
    with pytest.raises(ConfigError, match="code_share"):
        classifier(code_share=2.0)


def test_a_long_prompt_is_read_at_both_ends() -> None:
    long = "Plain words without any sign. " * 4000
    assert classifier().classify(long) == "document"
    code = "def f(x):\n    return x\n" * 400
    assert len(code) > rules.HEAD_CHARS + rules.TAIL_CHARS
    assert classifier().classify(code + "\nWhat does f return?") == "code"


def test_the_request_s_own_word_counts_first() -> None:
    assert workload_of("Solve x^2 = 4.", "support", classifier(), "default") == "support"
    assert workload_of("Solve x^2 = 4.", None, classifier(), "default") == "maths"
    assert workload_of("Solve x^2 = 4.", None, None, "default") == "default"
    assert workload_of("", None, classifier(), "default") == "default"
    assert all(workload_of(p, None, classifier(), "") in CLASSES for p, _ in PROMPTS if p)
