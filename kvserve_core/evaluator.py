"""What a quality evaluator implements: prepare once with the uncompressed model, then judge any roundtrip.

An evaluator is given an engine (:class:`kvserve_core.evaluation.engine.Engine`) and texts. Only the KV of prompts goes
through the roundtrip, as in serving; what is generated after them is the engine's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

from kvserve_core.component import ComponentConfig
from kvserve_core.evaluation.engine import Engine, Progress, Roundtrip, Text, quiet
from kvserve_core.evaluation.quality import Interval


@dataclass(frozen=True)
class Share:
    """Relative quality on one kind of text, and the samples that it is from."""

    quality: Interval
    samples: int


@dataclass(frozen=True)
class Evaluation:
    """What an evaluator says of a roundtrip.

    quality: relative to uncompressed KV, 1.0 is no loss, with its 95 % bounds, all within [0, 1]. metrics: figures
    behind it, such as ``kl``. samples: how many there were. by_kind: the same for each kind of text, where it has any.
    """

    quality: Interval
    samples: int
    metrics: Mapping[str, Interval] = field(default_factory=dict)
    by_kind: Mapping[str, Share] = field(default_factory=dict)


class Prepared(ABC):
    """An evaluator with its prompts prefilled and the answers of the uncompressed model at hand."""

    @abstractmethod
    def run(self, roundtrip: Roundtrip) -> Evaluation:
        """Quality of one roundtrip. May be called as often as wanted."""

    def close(self) -> None:
        """Release what the engine holds. The default holds nothing."""


class Evaluator(ABC):
    """Measures what a roundtrip of prompt KV does to answers, against the same model without it."""

    Config: ClassVar[type[ComponentConfig]] = ComponentConfig

    config: ComponentConfig

    def __init__(self, config: ComponentConfig) -> None:
        self.config = config

    def quick(self, samples: int) -> Self:
        """A cheaper one for a search, whose finds are measured again by the whole: at most so many samples."""
        held = getattr(self.config, "samples", 0)
        if held == 0 or (held is not None and held <= samples):
            return self
        return type(self)(self.config.model_copy(update={"samples": samples}))

    @abstractmethod
    def prepare(self, engine: Engine, texts: Sequence[Text], progress: Progress = quiet) -> Prepared:
        """Choose samples (seeded, the same for every roundtrip) and run the uncompressed model on them.

        Raises:
            ConfigError: there is nothing that it could be judged by.
        """
