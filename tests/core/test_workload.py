"""Text of requests, for a classifier to read."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserve_core.registry import default_registry
from kvserve_core.workload import WorkloadClassifier, text_of, workload_of

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"prompt": "Solve x = 1."}, "Solve x = 1."),
        ({"prompt": ["one text"]}, "one text"),
        ({"prompt": [1, 2, 3]}, ""),
        ({"prompt": [[1, 2, 3]]}, ""),
        ({"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}, "a\n\nb"),
        (
            {"messages": [{"content": [{"type": "image_url"}, {"type": "text", "text": "What is this?"}]}]},
            "What is this?",
        ),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}, "no message", {}]}, ""),
        ({}, ""),
    ],
)
def test_the_text_of_a_body(body: dict[str, Any], text: str) -> None:
    assert text_of(body) == text


@given(prompt=JSON, messages=JSON)
def test_whatever_a_client_sends_has_some_text(prompt: Any, messages: Any) -> None:
    assert isinstance(text_of({"prompt": prompt, "messages": messages}), str)


def test_a_chat_is_classified_by_its_text_unless_the_request_says() -> None:
    classifier: WorkloadClassifier = default_registry().create("workload", "rules")
    body = {"messages": [{"role": "user", "content": "Write a Python function that reverses a list."}]}
    assert workload_of(text_of(body), None, classifier, "default") == "code"
    assert workload_of(text_of(body), "legal", classifier, "default") == "legal"
    assert workload_of(text_of({"prompt": [1, 2]}), None, classifier, "default") == "default"
