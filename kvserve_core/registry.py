"""Every installed component by kind and name: rows to list, classes to create, errors that help."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import inspect
import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from types import MappingProxyType
from typing import Any, Literal

from pydantic import ValidationError

from kvserve_core.component import Component, ComponentConfig, ComponentSpec, Kind, config_error
from kvserve_core.errors import (
    ConfigError,
    UnavailableComponentError,
    UnknownNameError,
    did_you_mean,
)
from kvserve_core.plugins import DISABLED, Broken, Loaded, Manifest, by_kind, incompatible, load_plugins

Status = Literal["ok", "unavailable", "broken"]
BASES: dict[Kind, str] = {
    "transform": "kvserve_core.stages:Transform",
    "quantizer": "kvserve_core.stages:Quantizer",
    "codec": "kvserve_core.stages:Codec",
    "transport": "kvserve_core.transport:Transport",
    "policy": "kvserve_core.policy:Policy",
    "evaluator": "kvserve_core.evaluator:Evaluator",
    "workload": "kvserve_core.workload:WorkloadClassifier",
}
"""What a component of each kind must subclass; named, because some of them import torch."""


@dataclass(frozen=True)
class Row:
    """One line of ``kvserve list-components``. ``source`` is a path below the folder it is imported from."""

    kind: str
    name: str
    status: Status
    reason: str
    provider: str
    version: str
    source: str
    summary: str


class Registry:
    """Built once from the plugins, then read-only."""

    def __init__(self, loaded: Loaded) -> None:
        self._broken = [
            Row(b.kind, b.name, _status(b), b.reason, b.provider.distribution, b.provider.version, "", "")
            for b in loaded.broken
        ]
        known: dict[tuple[Kind, str], Manifest] = {}
        for manifest in by_kind(loaded):
            reason = incompatible(manifest) or _taken(known, manifest)
            if reason:
                self._broken.append(_row(manifest, "broken", reason))
            else:
                known[manifest.kind, manifest.component.name] = manifest
        self.manifests = MappingProxyType(known)

    def rows(self, *, strict: bool = False) -> list[Row]:
        """All rows. Status comes from cheap probes; ``strict`` imports every component."""
        return [self._probe(m, strict) for m in self.manifests.values()] + self._broken

    def names(self, kind: Kind) -> list[str]:
        """Names of one kind, sorted."""
        return sorted(name for k, name in self.manifests if k == kind)

    def manifest(self, kind: Kind, name: str) -> Manifest:
        """The manifest of a component.

        Raises:
            UnknownNameError: nothing installed has this name; the message gives the nearest one.
            UnavailableComponentError: it was declared, but cannot be used; the message says why.
        """
        found = self.manifests.get((kind, name))
        if found is None:
            for row in self._broken:
                if row.name == name and row.kind == kind:
                    raise UnavailableComponentError(f"{kind} {name!r} is broken: {row.reason}")
            raise UnknownNameError(did_you_mean(name, self.names(kind), kind))
        return found

    def load(self, kind: Kind, name: str) -> Any:
        """The component's class, imported now.

        Raises:
            UnavailableComponentError: a library or a device is missing (the message names the extra to install),
                or what the manifest names cannot be imported or is not a component of this kind.
        """
        component = self.manifest(kind, name).component
        if reason := unavailable(component):
            raise UnavailableComponentError(f"{kind} {name!r} cannot be used here: {reason}")
        try:
            cls = _resolve(component.target)
        except (Exception, SystemExit) as error:  # a component may fail in any way while it is imported
            raise UnavailableComponentError(f"{kind} {name!r} cannot be imported: {error}") from error
        if reason := _unfit(kind, cls):
            raise UnavailableComponentError(f"{kind} {name!r} is broken: {component.target!r} {reason}")
        return cls

    def configure(self, kind: Kind, spec: ComponentSpec | str, path: str = "") -> tuple[Any, ComponentConfig]:
        """The class and its validated configuration, without an instance.

        Raises:
            ConfigError: as :meth:`create`.
        """
        try:
            spec = _spec(spec)
            cls = self.load(kind, spec.name)
            return cls, _config(cls, spec)
        except ConfigError as error:
            raise error.under(path) from error.__cause__

    def create(self, kind: Kind, spec: ComponentSpec | str, path: str = "") -> Any:
        """An instance from its spec. ``path`` is put before the field in errors.

        Raises:
            ConfigError: unknown name or field, value out of range, or missing library.
        """
        cls, config = self.configure(kind, spec, path)
        try:
            return cls(config)
        except ConfigError as error:
            raise error.under(path) from error.__cause__

    def _probe(self, manifest: Manifest, strict: bool) -> Row:
        if reason := unavailable(manifest.component):
            return _row(manifest, "unavailable", reason)
        if strict:
            try:
                self.load(manifest.kind, manifest.component.name)
            except UnavailableComponentError as error:
                return _row(manifest, "broken", str(error))
        return _row(manifest, "ok", _advice(manifest))


def _taken(known: dict[tuple[Kind, str], Manifest], manifest: Manifest) -> str | None:
    kind, name = manifest.kind, manifest.component.name
    other = known.get((kind, name))
    if other is None:
        return None
    ours, theirs = manifest.provider, other.provider
    if ours.distribution == theirs.distribution:
        return f"{kind} {name!r} is declared twice by {ours.distribution!r}; {other.component.target!r} is used"
    return f"{kind} {name!r} of {ours.distribution!r} is already provided by {theirs.distribution!r}; rename it"


def _advice(manifest: Manifest) -> str:
    name, provider = manifest.component.name, manifest.provider
    if provider.built_in or "." in name:
        return ""
    return f"names of third parties are dotted, so that they never collide: {provider.plugin + '.' + name!r}"


def _resolve(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _unfit(kind: Kind, cls: Any) -> str | None:
    """Why a class cannot serve as a component of this kind, or None."""
    if not isinstance(cls, type):
        return f"is not a class but {type(cls).__name__!r}"
    if kind in BASES and not issubclass(cls, _resolve(BASES[kind])):
        return f"does not subclass {BASES[kind].replace(':', '.')!r}"
    if missing := sorted(getattr(cls, "__abstractmethods__", ())):
        return f"does not implement {', '.join(map(repr, missing))}"
    config = getattr(cls, "Config", None)
    if not (isinstance(config, type) and issubclass(config, ComponentConfig)):
        return "has no nested class Config(ComponentConfig)"
    return None


def _spec(spec: object) -> ComponentSpec:
    try:
        return ComponentSpec.model_validate(spec)
    except ValidationError as error:
        if isinstance(spec, dict):
            raise config_error(error, ComponentSpec, spec, "field of a component") from None
        message = f"a component is written as 'name' or {{'name': ..., 'configuration': {{...}}}}, got {spec!r}"
        raise ConfigError(message) from None


def _config(cls: Any, spec: ComponentSpec) -> Any:
    given = dict(spec.configuration)
    try:
        return cls.Config.model_validate(given)
    except ValidationError as error:
        raise config_error(error, cls.Config, given, f"field of {spec.name!r}").under("configuration") from None


def unavailable(component: Component) -> str | None:
    """Why a component cannot be used here, found without importing it, or None."""
    missing = [m for m in component.requires if locate(m) is None]
    if missing:
        hint = f"; pip install '{component.extra}'" if component.extra else ""
        return f"needs {', '.join(map(repr, missing))}, which is not installed{hint}"
    if unknown := sorted(set(component.needs) - {"cuda"}):
        return f"needs {', '.join(map(repr, unknown))}, which this kvserve cannot detect; it knows 'cuda'"
    if "cuda" in component.needs and not _has_cuda():
        return "needs an NVIDIA GPU; no libcuda was found"
    return None


@lru_cache(maxsize=256)
def locate(module: str) -> ModuleSpec | None:
    """Where a module would be imported from, or None. Unlike ``find_spec`` it imports no parent package."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
        for depth, _ in enumerate(rest, 2):
            if spec is None or spec.submodule_search_locations is None:
                return None
            name = ".".join(module.split(".")[:depth])
            spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    except (ImportError, ValueError):  # a module that hides its own spec
        return None
    return spec


@lru_cache(maxsize=1)
def _has_cuda() -> bool:
    """Whether the driver's library loads. That initialises no device; ``find_library`` would start a compiler."""
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    return True


def source_of(component: Component) -> str:
    """``kvserve_plugins/codecs/zstd.py``: a component's file, below the folder that it is imported from."""
    module = component.target.partition(":")[0]
    spec = locate(module)
    is_package = spec is not None and spec.submodule_search_locations is not None
    return module.replace(".", "/") + ("/__init__.py" if is_package else ".py")


def _status(broken: Broken) -> Status:
    return "unavailable" if broken.reason == DISABLED else "broken"


def _row(manifest: Manifest, status: Status, reason: str) -> Row:
    component, provider = manifest.component, manifest.provider
    return Row(
        manifest.kind,
        component.name,
        status,
        reason,
        provider.distribution,
        provider.version,
        source_of(component),
        component.summary,
    )


@lru_cache(maxsize=1)
def default_registry() -> Registry:
    """The registry of this process, loaded on first use."""
    return Registry(load_plugins())


def summary_of(cls: type) -> str:
    """First docstring line of a class: what its manifest's summary must equal."""
    return (inspect.getdoc(cls) or "").partition("\n")[0]
