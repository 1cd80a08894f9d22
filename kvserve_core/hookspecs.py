"""The public face of the registry: one registration hook per kind. Hooks are cold: each is called once, at load.

A hook function yields manifests (:class:`kvserve_core.Component`), never classes, and imports nothing heavy::

    from collections.abc import Iterator

    from kvserve_core import Component, hookimpl

    @hookimpl
    def kvserve_codecs() -> Iterator[Component]:
        yield Component("acme.rle", "acme.rle:RunLength", "Run-length codes.")
"""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from kvserve_core.component import Component, Kind

PROJECT = "kvserve"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def kvserve_transforms() -> Iterable[Component]:
    """Transforms: subclasses of :class:`kvserve_core.Transform`."""
    return ()


@hookspec
def kvserve_quantizers() -> Iterable[Component]:
    """Quantizers: subclasses of :class:`kvserve_core.Quantizer`."""
    return ()


@hookspec
def kvserve_codecs() -> Iterable[Component]:
    """Codecs: subclasses of :class:`kvserve_core.Codec`."""
    return ()


@hookspec
def kvserve_transports() -> Iterable[Component]:
    """Transports and stores: subclasses of :class:`kvserve_core.Transport` or :class:`kvserve_core.Store`."""
    return ()


@hookspec
def kvserve_policies() -> Iterable[Component]:
    """Policies: subclasses of :class:`kvserve_core.Policy`."""
    return ()


@hookspec
def kvserve_evaluators() -> Iterable[Component]:
    """Quality evaluators for the profiler: subclasses of :class:`kvserve_core.Evaluator`."""
    return ()


@hookspec
def kvserve_workload() -> Iterable[Component]:
    """Workload classifiers: subclasses of :class:`kvserve_core.WorkloadClassifier`."""
    return ()


HOOKS: dict[str, Kind] = {
    "kvserve_transforms": "transform",
    "kvserve_quantizers": "quantizer",
    "kvserve_codecs": "codec",
    "kvserve_transports": "transport",
    "kvserve_policies": "policy",
    "kvserve_evaluators": "evaluator",
    "kvserve_workload": "workload",
}
"""Hook name to kind, in listing order."""
