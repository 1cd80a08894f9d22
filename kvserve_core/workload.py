"""What a workload classifier implements: the name ``w`` of a prompt, whose quality records apply. Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import ClassVar

from kvserve_core.component import ComponentConfig

CLASSES = ("code", "maths", "document", "chat")
"""What the built-in classifier tells apart; other classifiers may have names of their own."""


class WorkloadClassifier(ABC):
    """Names the workload of a prompt, for requests whose router did not."""

    Config: ClassVar[type[ComponentConfig]] = ComponentConfig

    config: ComponentConfig

    def __init__(self, config: ComponentConfig) -> None:
        self.config = config

    @abstractmethod
    def classify(self, prompt: str) -> str:
        """The workload, such as ``code``. Called once a request by the scheduler: take a few milliseconds at most."""


def workload_of(prompt: str, given: str | None, classifier: WorkloadClassifier | None, default: str) -> str:
    """The request's own word for it, else the classifier's, else the deployment's default."""
    if given:
        return given
    return classifier.classify(prompt) if classifier is not None and prompt else default


def text_of(body: Mapping[str, object]) -> str:
    """What a classifier reads of the body of a completion or chat request in OpenAI's form; empty for prompts of ids.

    Of a chat all messages count, whoever wrote them: documents often stand in the system's. A body comes from a client,
    so that fields of any type are read as far as they are text.
    """
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join([*_strings(prompt), *_contents(body.get("messages"))])


def _contents(messages: object) -> Iterator[str]:
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, str):
            yield content
        elif isinstance(content, list):
            yield from _strings([part.get("text") for part in content if isinstance(part, Mapping)])


def _strings(values: object) -> Iterator[str]:
    yield from (value for value in (values if isinstance(values, list) else ()) if isinstance(value, str))
