"""All checks, in the order in which they are run: what is cheap and explains later failures comes first."""

from __future__ import annotations

from types import ModuleType

from kvserve_core.errors import KVServeError
from kvserve_core.testing import (
    checks_codec,
    checks_config,
    checks_far,
    checks_golden,
    checks_params,
    checks_pipeline,
    checks_policy,
    checks_slices,
    checks_transport,
    checks_values,
)
from kvserve_core.testing.check import Check
from kvserve_core.testing.subject import Subject

MODULES = (
    checks_config,
    checks_values,
    checks_params,
    checks_slices,
    checks_codec,
    checks_transport,
    checks_policy,
    checks_pipeline,
    checks_far,
    checks_golden,
)


def _checks(module: ModuleType) -> list[Check]:
    return [value for value in vars(module).values() if isinstance(value, Check)]


CHECKS: tuple[Check, ...] = tuple(c for module in MODULES for c in _checks(module))


def checks_for(subject: Subject) -> list[Check]:
    """The demands on a component, chosen by its kind and its capabilities.

    Only :func:`~.checks_config.instance`, which says why, of one that cannot be created or asked what it can do.

    Raises:
        KVServeError: its name, its configuration or what it needs is not there.
    """
    try:
        return [each for each in CHECKS if each.applies(subject)]
    except (KVServeError, KeyboardInterrupt):
        raise
    except BaseException:
        return [checks_config.instance]
