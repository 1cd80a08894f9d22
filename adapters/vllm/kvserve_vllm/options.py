"""Keys of ``kv_connector_extra_config`` that only this adapter knows; the others are kvserve's settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvserve_core.errors import ConfigError


@dataclass(frozen=True)
class Options:
    """sync_load: load before the forward pass of the step that needs the KV, not between steps.

    prefix_store: the store that keeps prefixes, such as ``file`` (configured in ``transport.file``); empty for none.
    """

    sync_load: bool = False
    prefix_store: str = ""


def split_options(extra: Mapping[str, Any] | None) -> tuple[Options, dict[str, Any]]:
    """``(this adapter's options, settings)``.

    Raises:
        ConfigError: an option is not what it should be.
    """
    settings = dict(extra or {})
    sync_load = settings.pop("sync_load", False)
    if not isinstance(sync_load, bool):
        raise ConfigError(f"must be true or false, got {sync_load!r}", "kv_connector_extra_config.sync_load")
    prefix_store = settings.pop("prefix_store", "")
    if not isinstance(prefix_store, str):
        raise ConfigError(
            f"must be the name of a store such as 'file', got {prefix_store!r}",
            "kv_connector_extra_config.prefix_store",
        )
    return Options(sync_load, prefix_store), settings
