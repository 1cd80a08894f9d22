"""Whether the figures and names of a request can be: at a glance for each request, and by name when one cannot."""

from __future__ import annotations

from kvserve_core.bandwidth import MAX_BYTES, MAX_SECONDS
from kvserve_core.errors import ConfigError
from kvserve_core.feasible import MAX_ACTIVE, MAX_FIGURE, MIN_RATE, SLO_KINDS, check_context, check_reckoning
from kvserve_core.model_time import MAX_TOKENS
from kvserve_core.policy import ServiceContext
from kvserve_core.pricing import shown

Key = tuple[str, float | None, frozenset[str] | None, str]


def menu_key(context: ServiceContext) -> Key:
    """What a menu depends on."""
    return context.workload, context.min_quality, context.acceptable, context.intent


def check(context: ServiceContext) -> None:
    """Refuse a request that no decision can be made for.

    Raises:
        ConfigError: a figure is not finite or out of range, or a name is none; its path names the field.
    """
    check_context(context)
    check_reckoning(context)
    _check_names(context)


def usual(context: ServiceContext) -> bool:
    """Whether all is right at a glance, in one expression; what is not usual may still be."""
    bandwidth, slo_s, active = context.bandwidth, context.slo_s, context.active
    tokens, acceptable = context.tokens, context.acceptable
    try:
        return (
            0 <= context.nbytes <= MAX_BYTES
            and 0 <= context.model_s <= MAX_SECONDS >= context.elapsed_s >= 0 <= context.output_tokens <= MAX_TOKENS
            and (tokens is None or 0 <= tokens <= MAX_TOKENS)
            and (bandwidth is None or MIN_RATE <= bandwidth <= MAX_FIGURE)
            and (slo_s is None or 0 <= slo_s <= MAX_FIGURE)
            and (active is None or 0 <= active <= MAX_ACTIVE)
            and (acceptable is None or type(acceptable) is frozenset)
            and type(context.workload) is str is type(context.link)
            and context.slo_kind in SLO_KINDS
        )
    except TypeError:
        return False


def _check_names(context: ServiceContext) -> None:
    for field in ("workload", "link"):
        if not isinstance(value := getattr(context, field), str):
            raise ConfigError(f"{shown(value)} is no name; expected text", field)
    if not isinstance(context.acceptable, frozenset | None):
        expected = "expected a frozenset of names, or None for all"
        raise ConfigError(f"{shown(context.acceptable)} says nothing of profiles; {expected}", "acceptable")
