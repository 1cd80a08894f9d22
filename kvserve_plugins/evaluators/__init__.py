"""Built-in evaluators. Manifests only: the classes are imported when they are used."""

from __future__ import annotations

from collections.abc import Iterator

from kvserve_core.component import Component
from kvserve_core.hookspecs import hookimpl


@hookimpl
def kvserve_evaluators() -> Iterator[Component]:
    """The evaluators that come with kvserve."""
    here = "kvserve_plugins.evaluators"
    yield Component(
        "continuation",
        f"{here}.continuation:Continuation",
        "KL, top-1 and likelihood of real continuations, fed through a restored prompt.",
    )
    yield Component("passkey", f"{here}.passkey:Passkey", "Digits told once in a long text and asked for at its end.")
    yield Component(
        "copy_lookup",
        f"{here}.copy_lookup:CopyLookup",
        "Whether copies and table lookups go on as they do without compression, token by token.",
    )
    yield Component(
        "lm_eval",
        f"{here}.lm_eval:LmEval",
        "Any task of lm-evaluation-harness, its prompts' KV compressed and restored.",
        requires=("lm_eval",),
        extra="kvserve[lm-eval]",
    )
