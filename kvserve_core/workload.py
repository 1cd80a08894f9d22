"""What a workload classifier implements: the name ``w`` of a prompt, whose quality records apply. Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
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
