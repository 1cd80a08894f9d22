"""The evaluator that resolves the smallest losses: distributions over real text, not answers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import Field

from kvserve_core.component import ComponentConfig
from kvserve_core.errors import ConfigError
from kvserve_core.evaluation.bench import CONTINUATION_TOKENS, PROMPT_TOKENS, Bench
from kvserve_core.evaluation.engine import Engine, Progress, Roundtrip, Text, TokenText, quiet
from kvserve_core.evaluation.quality import Interval, Quality
from kvserve_core.evaluation.sampling import stratified
from kvserve_core.evaluator import Evaluation, Evaluator, Prepared, Share


class Continuation(Evaluator):
    """KL, top-1 and likelihood of real continuations, fed through a restored prompt.

    Quality is ``exp(-mean KL)``; its bounds are those of the 95 % t-interval on the mean over texts. Metrics: ``kl``
    and ``dnll`` in nats a token, ``top1`` as a share.

    The loss is largest right after the prompt and falls as fresh tokens join what is attended to, so that fewer
    continuation tokens are a harder measure, not a cheaper one of the same: a search takes fewer texts only.
    """

    class Config(ComponentConfig):
        """samples: texts, even over their kinds; None for all. The others are tokens of each text."""

        samples: int | None = Field(None, ge=1)
        seed: int = 0
        prompt_tokens: int = Field(PROMPT_TOKENS, ge=1)
        continuation_tokens: int = Field(CONTINUATION_TOKENS, ge=2)

    config: Config

    def prepare(self, engine: Engine, texts: Sequence[Text], progress: Progress = quiet) -> Prepared:
        """Tokenize, prefill and score the texts."""
        config = self.config
        chosen = stratified(texts, lambda t: t.kind, config.samples, config.seed)
        if not chosen:
            raise ConfigError("there are no texts to continue; name some", "texts")
        length = config.prompt_tokens + config.continuation_tokens
        ids = [TokenText(t.name, tuple(engine.tokenize(t.text)[:length])) for t in chosen]
        return _Prepared(Bench(engine, ids, config.prompt_tokens, progress), [t.kind for t in chosen])


class _Prepared(Prepared):
    def __init__(self, bench: Bench, kinds: Sequence[str]) -> None:
        self._bench, self._kinds = bench, kinds

    def run(self, roundtrip: Roundtrip) -> Evaluation:
        quality = self._bench.run(roundtrip)
        members = {
            kind: Quality(tuple(t for t, k in zip(quality.texts, self._kinds, strict=True) if k == kind))
            for kind in dict.fromkeys(self._kinds)
        }
        return Evaluation(
            relative(quality),
            len(quality.texts),
            {"kl": quality.kl, "top1": quality.top1, "dnll": quality.dnll},
            {kind: Share(relative(q), len(q.texts)) for kind, q in members.items()},
        )

    def close(self) -> None:
        self._bench.close()


def relative(quality: Quality) -> Interval:
    """``exp(-KL)`` with its bounds, within [0, 1]; a single text leaves both open."""
    low, high = (0.0 if math.isinf(quality.kl.high) else quality.lower), quality.upper
    return Interval(quality.value, min(low, quality.value), max(high, quality.value))
