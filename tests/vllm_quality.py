"""What a lossy profile costs, judged by an engine itself: texts forced after contexts that it computed or was sent.

The context of a text is a request of its own, whose whole blocks stay in the engine's prefix cache (``allow``). The
whole text then goes on from these blocks: the log-probabilities of its other tokens are those of that context's KV.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Logprobs = Mapping[int, float]
"""Of the likeliest tokens at one place, and of the text's own."""


@dataclass(frozen=True)
class Loss:
    """Means over places. kl, more_nats: of lossy context against exact. top1: how often the likeliest is the same."""

    kl: float
    more_nats: float
    top1: float


def forced(llm: Any, text: Sequence[int], seen: int, top: int) -> tuple[list[Logprobs], int]:
    """For each token after ``seen``; and how many tokens came from the prefix cache."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=1, detokenize=False, prompt_logprobs=top, skip_reading_prefix_cache=False
    )
    (output,) = llm.generate([{"prompt_token_ids": list(text)}], sampling, use_tqdm=False)
    return [
        {t: x.logprob for t, x in place.items()} for place in output.prompt_logprobs[seen:]
    ], output.num_cached_tokens


def loss(
    exact: Sequence[Sequence[Logprobs]], lossy: Sequence[Sequence[Logprobs]], texts: Sequence[Sequence[int]], seen: int
) -> Loss:
    """Of texts whose tokens from ``seen`` on were judged."""
    places = [
        (e, q, token)
        for text, es, qs in zip(texts, exact, lossy, strict=True)
        for token, e, q in zip(text[seen:], es, qs, strict=True)
    ]
    return Loss(
        sum(kl(e, q) for e, q, _ in places) / len(places),
        sum(e[token] - q[token] for e, q, token in places) / len(places),
        sum(max(e, key=e.__getitem__) == max(q, key=q.__getitem__) for e, q, _ in places) / len(places),
    )


def kl(reference: Logprobs, test: Logprobs) -> float:
    """KL over the tokens that both name, and the rest as one outcome."""
    both = reference.keys() & test.keys()
    total = sum(math.exp(reference[t]) * (reference[t] - test[t]) for t in both)
    rest_p = max(1e-9, 1 - sum(math.exp(reference[t]) for t in both))
    rest_q = max(1e-9, 1 - sum(math.exp(test[t]) for t in both))
    return total + rest_p * math.log(rest_p / rest_q)
