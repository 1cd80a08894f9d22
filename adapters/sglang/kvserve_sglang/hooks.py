"""What SGLang's queues tell us through its hook registry: the pools themselves, and how long a prompt is."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from kvserve_core.errors import ConfigError
from kvserve_core.requests import RequestOptions
from kvserve_core.spec import SEGMENT_TOKENS

CUSTOM = "kvserve"
"""The key in ``sampling_params.custom_params`` that holds a request's options."""
HEAD_TOKENS, TAIL_TOKENS = 1024, 512
"""What a workload classifier is shown of a long prompt."""
log = logging.getLogger(__name__)


def bind_manager(manager: Any, queue: Any, *args: Any, **kwargs: Any) -> Any:
    """AFTER ``_init_kv_manager``: hand the manager the pool, of which it knows addresses only.

    An error here ends the server, on purpose: it cannot serve this model the way it was asked to.
    """
    del args, kwargs
    if hasattr(manager, "bind_engine"):
        manager.bind_engine(queue)
    return manager


def describe_request(ready: bool, queue: Any, req: Any, *args: Any, **kwargs: Any) -> bool:
    """AFTER ``finalize_bootstrap``: tell the sender how many tokens the prompt has, so that it need not wait for them.

    Never raises: a request that cannot be described is sent with its last chunk, by the deployment's settings.
    """
    del queue, args, kwargs
    sender = getattr(req, "disagg_kv_sender", None)
    if ready and hasattr(sender, "describe"):
        try:
            sender.describe(len(req.origin_input_ids), options_of(req), partial(prefilled, req), partial(text_of, req))
        except Exception:
            log.exception("request %r is not described", getattr(req, "rid", "?"))
            sender.kv_mgr.hook_failed("describe")
    return ready


def prefilled(req: Any) -> tuple[int, float] | None:
    """Tokens that a request's prefill computed and its seconds, from the first of its batches to the end of the last.

    None where SGLang does not say, and where nearly all was cached: what is left says little of prefill's speed.
    """
    stats = getattr(req, "time_stats", None)
    began_s, ended_s = (getattr(stats, name, 0.0) for name in ("forward_entry_time", "prefill_finished_time"))
    cached = getattr(req, "cached_tokens", 0)
    tokens = len(req.origin_input_ids) - cached
    if not 0 < began_s < ended_s or (cached and tokens < SEGMENT_TOKENS):
        return None
    return tokens, ended_s - began_s


def text_of(req: Any) -> str:
    """A prompt's beginning and end, which SGLang's scheduler keeps as tokens only; empty without a tokenizer."""
    tokenizer, tokens = getattr(req, "tokenizer", None), list(req.origin_input_ids)
    if tokenizer is None:
        return ""
    parts = [tokens] if len(tokens) <= HEAD_TOKENS + TAIL_TOKENS else [tokens[:HEAD_TOKENS], tokens[-TAIL_TOKENS:]]
    return "\n".join(str(tokenizer.decode(part)) for part in parts)


def options_of(req: Any) -> RequestOptions:
    """``{"sampling_params": {"custom_params": {"kvserve": {"slo": "200ms"}}}}`` of a request."""
    try:
        return RequestOptions.parse((getattr(req.sampling_params, "custom_params", None) or {}).get(CUSTOM))
    except (ConfigError, AttributeError) as error:
        log.warning("the kvserve options of request %s are left out: %s", getattr(req, "rid", "?"), error)
        return RequestOptions()
