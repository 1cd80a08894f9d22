"""The ``vllm.general_plugins`` entry point: makes ``"kv_connector": "KVServeConnector"`` enough. Light to import."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)
NAME = "KVServeConnector"
MODULE = "kvserve_vllm.connector"


def register() -> None:
    """Tell vLLM where the connector is; safe to call again, as vLLM does in every process.

    vLLM loads plugins for every model, also where kvserve is installed and not used: nothing may end it here.
    """
    try:
        _register()
    except Exception as error:  # noqa: BLE001  # the name is a convenience: an engine starts without it
        log.warning(
            'vLLM cannot be told where %s is (%r); name it in --kv-transfer-config: "kv_connector_module_path": "%s"',
            NAME,
            error,
            MODULE,
        )


def _register() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:  # a second registration is an error there
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
