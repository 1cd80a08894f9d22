"""One set of settings for every engine, and where each value came from. Imports no torch.

``extra_config > environment > file > default``. The file is TOML, named by ``KVSERVE_CONFIG``. A variable is
``KVSERVE_`` and the upper-case field, with two underscores per level: ``KVSERVE_TRANSPORT__TCP__BIND``.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from kvserve_core.component import ComponentSpec, config_error
from kvserve_core.errors import ConfigError, did_you_mean
from kvserve_core.json_text import parsed
from kvserve_core.settings_tables import CpuSettings, GpuSettings, PeerSettings, TransportSettings, check_units
from kvserve_core.units import Bandwidth, Duration, Size
from kvserve_core.wire import VERSION

PREFIX = "KVSERVE_"
CONFIG_ENV = "KVSERVE_CONFIG"
CACHE_ENV = "KVSERVE_CACHE"
RESERVED = frozenset({CONFIG_ENV, CACHE_ENV, "KVSERVE_DISABLED_PLUGINS", "KVSERVE_TRACEBACK"})
"""Variables that are not settings; those that begin with ``KVSERVE_FAULT`` (injected failures) are not either."""

Source = Literal["extra_config", "env", "file", "default"]


def _listed(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_listed)]
"""A list of names, or one text with commas."""


def _written(version: str) -> str:
    if version != WRITES:
        raise ValueError(
            f"frame version {version!r} cannot be written, this kvserve writes {WRITES!r} only; leave 'wire_compat' out"
        )
    return version


WRITES = ".".join(map(str, VERSION))
"""The frame version that producers write."""
POLICY = ComponentSpec(name="analytic", configuration={"min_gain": 0.02})
"""Estimates and machines are not steady enough to tell 2 % from nothing."""
Speed = Annotated[Bandwidth, Field(gt=0)]
"""Of a link, above 0."""
WireVersion = Annotated[str, AfterValidator(_written)]
"""A frame version that this kvserve can write."""


class Settings(BaseModel):
    """Everything a deployment can set.

    The core reads ``library``, ``policy`` and ``transport`` itself (``kvserve doctor`` checks them), and has parameters
    that ``min_quality``, ``bandwidth``, ``priors``, ``chunk_bytes``, ``workload``, ``classifier`` and
    ``allow_unprofiled`` go to: the controller's and a context's. Engine adapters read the others and act on them:
    ``wire_compat``, ``peers.accept``, ``slo``, ``deadline``, ``lease``, ``published_bytes_max``, ``gpu``, ``cpu`` and
    ``lossy_prefix_cache``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    library: Path | None = Field(None, description="profile library; without one raw and lossless only")
    min_quality: float = Field(0.99, ge=0, le=1, description="lowest quality a profile may have, as a lower bound")
    slo: Duration = Field(2.0, description="latency budget of a request up to its first token")
    bandwidth: Bandwidth = Field(1.25e9, gt=0, description="link speed assumed until transfers were measured")
    priors: dict[str, Speed] = Field({}, description="the same of single links, a table by their names")
    chunk_bytes: Size | None = Field(
        None, gt=0, description="original bytes that are encoded, sent and decoded at a time; all at once"
    )
    policy: ComponentSpec = Field(POLICY, description="how a profile is picked; gains below 2 % are none")
    workload: str = Field("default", min_length=1, description="whose quality and ratio records apply")
    classifier: ComponentSpec | None = Field(None, description="names the workload of requests that do not, e.g. rules")
    transport: TransportSettings = Field(TransportSettings(), description="how segments move")
    peers: PeerSettings = Field(PeerSettings(), description="what is assumed of unknown consumers")
    allow_unprofiled: Names = Field((), description="lossy profiles to offer without a quality record")
    lossy_prefix_cache: Literal["forbid", "allow"] = Field(
        "forbid", description="whether an engine's prefix cache may hand lossy KV to other requests"
    )
    published_bytes_max: Size = Field(4 * 2**30, gt=0, description="host memory for published segments")
    gpu: GpuSettings = Field(GpuSettings(), description="what coding takes of a GPU")
    cpu: CpuSettings = Field(CpuSettings(), description="what decoding takes of a CPU that the engine computes on")
    lease: Duration = Field(30.0, gt=0, description="how long a published transfer is held without renewal")
    deadline: Duration = Field(30.0, gt=0, description="longest wait for a peer")
    wire_compat: WireVersion | None = Field(None, description="newest frame version to write")


@dataclass(frozen=True)
class Origin:
    """Where a value came from; ``detail`` is the variable or the file."""

    source: Source
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.source} {self.detail}".strip()


@dataclass(frozen=True)
class Loaded:
    """Settings, the origin of every value by its path, and variables that name no setting."""

    settings: Settings
    origins: Mapping[str, Origin]
    unknown_env: tuple[str, ...] = ()
    file: Path | None = None

    def values(self) -> Iterator[tuple[str, Any, Origin]]:
        """Path, value and origin of every setting."""
        for path, value in _leaves(self.settings.model_dump(mode="json")):
            yield path, value, _origin(self.origins, path) or _DEFAULT


@dataclass
class _Layers:
    """Values merged so far; later layers win."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)

    def add(self, values: Mapping[str, Any], origin: Origin) -> None:
        if "policy" in values:
            values = {**values, "policy": _replacing_policy(self.values, values["policy"])}
        _merge(self.values, values)
        self.origins.update({path: origin for path, _ in _leaves(values)})


_DEFAULT = Origin("default")


def load_settings(
    extra: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Loaded:
    """Settings from an engine's ``extra`` config, the environment and a file (``file``, else ``KVSERVE_CONFIG``).

    A relative ``library`` in a file is relative to that file.

    Raises:
        ConfigError: with the path of the field, where its value came from, and the nearest name for an unknown one.
    """
    environ = os.environ if environ is None else environ
    path = file or (Path(environ[CONFIG_ENV]) if environ.get(CONFIG_ENV) else None)
    layers = _Layers()
    if path is not None:
        layers.add(_read(path), Origin("file", str(path)))
    from_env, unknown = _from_environ(environ)
    for name, values in from_env:
        layers.add(values, Origin("env", name))
    if extra is not None:
        layers.add(_table(extra), Origin("extra_config"))
    return Loaded(_validate(layers), layers.origins, unknown, path)


def _table(extra: object) -> Mapping[str, Any]:
    if not isinstance(extra, Mapping) or not all(isinstance(key, str) for key in extra):
        got = "keys that are no text" if isinstance(extra, Mapping) else type(extra).__name__
        raise ConfigError(f"the engine's extra config must be a table of settings like {{'slo': '2s'}}, got {got}")
    return extra


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Where converted models and self-test results are kept: ``KVSERVE_CACHE``, else the user's cache folder."""
    environ = os.environ if environ is None else environ
    if chosen := environ.get(CACHE_ENV):
        return Path(chosen).expanduser()
    home = environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "kvserve"


def _validate(layers: _Layers) -> Settings:
    try:
        _check_tables(layers.values.get("transport"))
        check_units(_leaves(layers.values))
        return Settings.model_validate(layers.values)
    except ConfigError as error:
        wrong = error
    except ValidationError as error:
        wrong = config_error(error, Settings, layers.values, "setting")
    origin = _origin(layers.origins, wrong.path)
    raise ConfigError(f"{wrong.reason} (from {origin})" if origin else wrong.reason, wrong.path)


def _check_tables(transport: object) -> None:
    for key, given in transport.items() if isinstance(transport, Mapping) else ():
        if key != "name" and not isinstance(given, Mapping):
            known = did_you_mean(str(key), ["name"], "setting")
            message = f"{known}, or a table [transport.{key}] with that transport's configuration"
            raise ConfigError(message, f"transport.{key}")


def _origin(origins: Mapping[str, Origin], path: str) -> Origin | None:
    """Of the path itself, or of the whole table that it was given in."""
    while path and path not in origins:
        path = path.rpartition(".")[0]
    return origins.get(path)


def _replacing_policy(before: dict[str, Any], policy: Any) -> Any:
    """A policy under another name starts afresh: the configuration of the one before is not its own."""
    policy = {"name": policy} if isinstance(policy, str) else policy
    old = before.get("policy")
    if isinstance(policy, Mapping) and isinstance(old, dict) and policy.get("name", old.get("name")) != old.get("name"):
        del before["policy"]
    return policy


def _read(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the config file {str(path)!r} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, or nested too deep
        raise ConfigError(f"the config file {str(path)!r} is not TOML: {error}") from error
    if isinstance(values.get("library"), str):
        values["library"] = str(path.parent / Path(values["library"]).expanduser())
    return values


def _from_environ(environ: Mapping[str, str]) -> tuple[list[tuple[str, dict[str, Any]]], tuple[str, ...]]:
    found, unknown = [], []
    # Shorter names first: a whole table before one of its fields.
    for name in sorted(n for n in environ if n.startswith(PREFIX) and not _reserved(n)):
        keys = name.removeprefix(PREFIX).lower().split("__")
        if _is_setting(keys):
            found.append((name, _nested(keys, _env_value(name, environ[name]))))
        else:
            unknown.append(name)
    return found, tuple(unknown)


def _reserved(name: str) -> bool:
    return name in RESERVED or name.startswith("KVSERVE_FAULT")


_TABLES: dict[str, type[BaseModel]] = {
    "peers": PeerSettings,
    "gpu": GpuSettings,
    "cpu": CpuSettings,
    "policy": ComponentSpec,
}


def _is_setting(keys: list[str]) -> bool:
    if keys[0] not in Settings.model_fields or not all(keys):
        return False
    depths = dict.fromkeys(_TABLES, (1, 2)) | {"transport": (1, 2, 3), "policy": (1, 2, 3)}
    nested = depths.get(keys[0], (1,))
    known = _TABLES[keys[0]].model_fields if keys[0] in _TABLES else None
    return len(keys) in nested and (len(keys) == 1 or known is None or keys[1] in known)


def _env_value(name: str, text: str) -> Any:
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        return parsed(text)
    except ValueError as error:
        raise ConfigError(f"the variable {name!r} begins like JSON but is not: {error}") from error


def _nested(keys: list[str], value: Any) -> dict[str, Any]:
    for key in reversed(keys):
        value = {key: value}
    return dict(value)


def _merge(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = _copied(value)


def _copied(value: Any) -> Any:
    return {k: _copied(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value
