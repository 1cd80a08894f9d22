"""The entry point that vLLM calls in every process, whether kvserve is used there or not."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector import factory

from kvserve_vllm import plugin
from kvserve_vllm.connector import KVServeConnector


def test_the_short_name_is_enough_and_may_be_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory.KVConnectorFactory, "_registry", {})
    plugin.register()
    plugin.register()
    assert factory.KVConnectorFactory._registry[plugin.NAME]() is KVServeConnector


class Renamed:
    """A factory without the table that is looked into."""


class Refusing:
    """A factory that takes no connectors of others."""

    _registry: tuple[str, ...] = ()

    @classmethod
    def register_connector(cls, *given: Any) -> None:
        raise ValueError("injected")


@pytest.mark.parametrize("broken", [Renamed, Refusing])
def test_a_factory_that_changed_does_not_end_the_engine(
    broken: type, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(factory, "KVConnectorFactory", broken)
    plugin.register()
    assert '"kv_connector_module_path": "kvserve_vllm.connector"' in caplog.text
    assert "WARNING" in caplog.text
