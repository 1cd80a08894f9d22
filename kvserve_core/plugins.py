"""Guarded loading: one bad plugin becomes a row with its reason, and the others keep working.

pluggy's own loader stops at the first failure, so entry points are loaded one by one here, after the block list
(``KVSERVE_DISABLED_PLUGINS=a,b``) was asked and each inside its own guard. What was declared before a hook raised
is kept: each manifest is complete in itself.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points

import pluggy

from kvserve_core import hookspecs
from kvserve_core.component import API_VERSION, Component, Kind
from kvserve_core.errors import did_you_mean

ENTRY_POINT_GROUP = "kvserve"
DISABLED_ENV = "KVSERVE_DISABLED_PLUGINS"
DISABLED = f"disabled by {DISABLED_ENV}"
BUILT_IN = "kvserve_plugins"

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*(\.[a-z0-9][a-z0-9_-]*)*")
_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Provider:
    """Where a component came from: the entry point, and the distribution that declares it."""

    plugin: str
    distribution: str
    version: str
    built_in: bool = False


@dataclass(frozen=True)
class Manifest:
    """A component as a plugin declared it, with its provider."""

    kind: Kind
    component: Component
    provider: Provider


@dataclass(frozen=True)
class Broken:
    """A plugin, or one thing it declared, that cannot be used, and why. ``kind`` is ``plugin`` for a whole plugin."""

    kind: str
    name: str
    reason: str
    provider: Provider


@dataclass
class Loaded:
    """Everything the installed plugins declared."""

    manifests: list[Manifest] = field(default_factory=list)
    broken: list[Broken] = field(default_factory=list)


def load_plugins(points: list[EntryPoint] | None = None, environ: Mapping[str, str] | None = None) -> Loaded:
    """Load every plugin of the ``kvserve`` entry-point group and collect what it declares.

    Built-ins come through the same door, first, so that their names cannot be taken. Nothing is imported beyond
    the plugins' own (cheap) modules, and what those print or warn while imported goes to the log at debug level.
    """
    loaded = Loaded()
    disabled = disabled_names(environ)
    found = entry_points(group=ENTRY_POINT_GROUP) if points is None else points
    # One distribution may be found twice (an editable install and its folder on the path): load each point once.
    for point in sorted({(p.name, p.value): p for p in found}.values(), key=_built_in_first):
        provider = _provider(point)
        if disabled & {provider.plugin, provider.distribution}:
            loaded.broken.append(Broken("plugin", point.name, DISABLED, provider))
            continue
        try:
            with _quiet(point.name):
                _collect(_manager(point), provider, loaded)
        except (Exception, SystemExit) as error:  # whatever a plugin raises becomes its row
            loaded.broken.append(Broken("plugin", point.name, _said(error), provider))
    return loaded


def disabled_names(environ: Mapping[str, str] | None = None) -> frozenset[str]:
    """Entry-point or distribution names that the user has switched off."""
    text = (os.environ if environ is None else environ).get(DISABLED_ENV, "")
    return frozenset(name.strip() for name in text.split(",") if name.strip())


def _built_in(point: EntryPoint) -> bool:
    return point.module.partition(".")[0] == BUILT_IN


def _built_in_first(point: EntryPoint) -> tuple[bool, str, str]:
    return (not _built_in(point), point.name, point.value)


def _provider(point: EntryPoint) -> Provider:
    dist = point.dist
    built_in = _built_in(point)
    return Provider(point.name, dist.name if dist else point.value, dist.version if dist else "", built_in)


@contextlib.contextmanager
def _quiet(plugin: str) -> Iterator[None]:
    said = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        warnings.simplefilter("ignore")
        yield
    if said.getvalue():
        _log.debug("plugin %r printed while it was loaded: %s", plugin, said.getvalue().strip())


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _manager(point: EntryPoint) -> pluggy.PluginManager:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(point.load(), point.name)
    return manager


def _collect(manager: pluggy.PluginManager, provider: Provider, loaded: Loaded) -> None:
    (plugin,) = manager.get_plugins()
    if not manager.get_hookcallers(plugin):
        loaded.broken.append(Broken("plugin", provider.plugin, _no_hook(plugin), provider))
    for caller in manager.get_hookcallers(plugin) or ():
        kind = hookspecs.HOOKS.get(caller.name)
        if kind is None:
            _misspelt(caller, provider, loaded)
            continue
        for impl in caller.get_hookimpls():
            try:
                _declare(kind, caller.name, impl, provider, loaded)
            except (Exception, SystemExit) as error:  # one raising hook must not hide the plugin's others
                reason = f"{caller.name} raised {_said(error)}"
                loaded.broken.append(Broken(kind, provider.plugin, reason, provider))


def _no_hook(plugin: object) -> str:
    unmarked = [name for name in hookspecs.HOOKS if callable(getattr(plugin, name, None))]
    if unmarked:
        return f"{', '.join(unmarked)} is not marked; put @kvserve_core.hookimpl before it"
    return f"no hook is implemented; known hooks: {', '.join(hookspecs.HOOKS)}"


def _misspelt(caller: pluggy.HookCaller, provider: Provider, loaded: Loaded) -> None:
    """The rule of ``PluginManager.check_pending``: an unknown hook is an error unless marked optional."""
    if all(impl.optionalhook for impl in caller.get_hookimpls()):
        return
    reason = did_you_mean(caller.name, hookspecs.HOOKS, "hook")
    loaded.broken.append(Broken("plugin", provider.plugin, reason, provider))


def _declare(kind: Kind, hook: str, impl: pluggy.HookImpl, provider: Provider, loaded: Loaded) -> None:
    if impl.wrapper or impl.hookwrapper:
        raise TypeError("it is a hook wrapper; kvserve's hooks are called once each and cannot be wrapped")
    declared = impl.function()
    if not isinstance(declared, Iterable):
        raise TypeError(f"it returned {type(declared).__name__!r}; yield Component(...), or return a list of them")
    for component in declared:
        reason = malformed(component)
        if reason is None:
            loaded.manifests.append(Manifest(kind, component, provider))
        else:
            name = str(getattr(component, "name", provider.plugin))
            loaded.broken.append(Broken(kind, name, f"{hook}: {reason}", provider))


def malformed(component: object) -> str | None:
    """Why a value that a hook yielded is not a usable manifest, or None."""
    if not isinstance(component, Component):
        shown = component.__name__ if isinstance(component, type) else type(component).__name__
        return f"hooks yield Component(...) manifests, got {shown!r}"
    if not isinstance(component.name, str) or not _NAME.fullmatch(component.name):
        return f"name {component.name!r} is not lower case letters, digits, '_' and '-', dotted for third parties"
    if not isinstance(component.target, str) or not _TARGET.fullmatch(component.target):
        return f"target {component.target!r} is not written as 'package.module:Class'"
    for field_name in ("requires", "needs"):
        if isinstance(getattr(component, field_name), str):
            return f"{field_name} is text; write {field_name}=({getattr(component, field_name)!r},)"
    return None if isinstance(component.api, int) else f"api {component.api!r} is not a number"


def incompatible(manifest: Manifest) -> str | None:
    """Why this manifest's api version cannot be served here, or None."""
    api = manifest.component.api
    if api == API_VERSION:
        return None
    newer = "upgrade kvserve" if api > API_VERSION else f"upgrade {manifest.provider.distribution}"
    return f"written for plugin api {api}, this kvserve has {API_VERSION}; {newer}"


def by_kind(loaded: Loaded) -> Iterator[Manifest]:
    """Manifests in listing order: kind, then built-ins, then name; the first of equal names wins."""
    order = {kind: i for i, kind in enumerate(hookspecs.HOOKS.values())}
    yield from sorted(loaded.manifests, key=lambda m: (order[m.kind], not m.provider.built_in, m.component.name))
