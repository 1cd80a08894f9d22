"""What SGLang's queues tell us through its hook registry: the pools themselves, and how long a prompt is."""

from __future__ import annotations

import logging
from typing import Any

from kvserve_core.errors import ConfigError
from kvserve_core.requests import RequestOptions

CUSTOM = "kvserve"
"""The key in ``sampling_params.custom_params`` that holds a request's options."""
log = logging.getLogger(__name__)


def bind_manager(manager: Any, queue: Any, *args: Any, **kwargs: Any) -> Any:
    """AFTER ``_init_kv_manager``: hand the manager the pool, of which it knows addresses only.

    An error here ends the server, on purpose: it cannot serve this model the way it was asked to.
    """
    del args, kwargs
    if hasattr(manager, "bind_engine"):
        manager.bind_engine(queue)
    return manager


def describe_request(ready: bool, queue: Any, req: Any, *args: Any, **kwargs: Any) -> bool:
    """AFTER ``finalize_bootstrap``: tell the sender how many tokens the prompt has, so that it need not wait for them.

    Never raises; a request with options that cannot be read is served by the deployment's settings.
    """
    del queue, args, kwargs
    describe = getattr(req.disagg_kv_sender, "describe", None)
    if ready and describe is not None:
        describe(len(req.origin_input_ids), options_of(req))
    return ready


def options_of(req: Any) -> RequestOptions:
    """``{"sampling_params": {"custom_params": {"kvserve": {"slo": "200ms"}}}}`` of a request."""
    try:
        return RequestOptions.parse((getattr(req.sampling_params, "custom_params", None) or {}).get(CUSTOM))
    except (ConfigError, AttributeError) as error:
        log.warning("the kvserve options of request %s are left out: %s", getattr(req, "rid", "?"), error)
        return RequestOptions()
