"""A prefill and a decode engine, and what must hold of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_engines import EngineProcess, external_tokens, forget, generate, held

NEW_TOKENS = 16


class Pair:
    """A prefill and a decode engine."""

    def __init__(self, prefill: EngineProcess, decode: EngineProcess) -> None:
        self.prefill, self.decode = prefill, decode

    def alone(self, prompts: list[list[int]], count: int = NEW_TOKENS) -> list[list[int]]:
        """What the decode engine answers when it computes the prompts itself."""
        self.decode.call(forget)
        answers = self.decode.call(generate, prompts, count)
        assert self.decode.call(forget)
        return [answer.tokens for answer in answers]

    def offers(self, prompts: list[list[int]], table: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """What the prefill engine returns for its router, by prompt."""
        asked = [{"do_remote_decode": True, **({"kvserve": dict(table)} if table else {})}] * len(prompts)
        offered = [answer.params for answer in self.prefill.call(generate, prompts, 1, asked)]
        assert all(params is not None and params["do_remote_prefill"] for params in offered)
        return [dict(params) for params in offered if params is not None]

    def answers(self, prompts: list[list[int]], params: list[dict[str, Any]], count: int = NEW_TOKENS) -> list[Any]:
        """The decode engine's answers with these transfer params."""
        return list(self.decode.call(generate, prompts, count, params))

    def disaggregated(self, prompts: list[list[int]], table: Mapping[str, Any] | None = None) -> list[list[int]]:
        """Prefill there, decode here."""
        return [answer.tokens for answer in self.answers(prompts, self.offers(prompts, table))]


def check_equal(pair: Pair, prompts: list[list[int]]) -> None:
    """Disaggregated answers equal local ones, the KV did come from outside, and nothing is left behind."""
    before = pair.decode.call(external_tokens)
    expected = pair.alone(prompts)
    assert pair.disaggregated(prompts) == expected
    assert len({tuple(tokens) for tokens in expected}) == len(prompts)  # degenerate models would hide errors
    assert pair.decode.call(external_tokens) - before == sum(len(p) - 1 for p in prompts)
    for engine in (pair.decode, pair.prefill):
        assert not any(engine.call(held).values())
