"""The ``vllm.general_plugins`` entry point: makes ``"kv_connector": "KVServeConnector"`` enough. Light to import."""

from __future__ import annotations

NAME = "KVServeConnector"
MODULE = "kvserve_vllm.connector"


def register() -> None:
    """Tell vLLM where the connector is; safe to call again, as vLLM does in every process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
