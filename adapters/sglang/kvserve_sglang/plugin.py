"""What SGLang calls in each of its processes (entry-point group ``sglang.srt.plugins``), before it reads arguments.

SGLang logs an exception of a plugin and goes on without it. A server that asked for this backend must not: it would
refuse the name, or worse, serve without what was asked for. So a failure here is kept, and raised where the backend
is used; servers that do not use it are left alone.
"""

from __future__ import annotations

import inspect
import logging
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

from kvserve_core.errors import PluginError
from kvserve_sglang import backend
from kvserve_sglang.versions import check_version

GET_CLASS = "sglang.srt.disaggregation.utils.get_kv_class"
PREFILL_QUEUE = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue"
DECODE_QUEUE = "sglang.srt.disaggregation.decode.DecodePreallocQueue"
log = logging.getLogger(__name__)


def register() -> None:
    """Add the backend ``kvserve``; never raises but to end a server that asked for it and cannot have it."""
    try:
        _install()
    except Exception as error:  # noqa: BLE001  # whatever is wrong with this SGLang must be said, not logged away
        refuse(f"kvserve cannot be used in this SGLang: {error}")


def refuse(reason: str) -> None:
    """Make every use of the backend fail with ``reason``."""
    log.error(reason)
    if _asked_for(sys.argv):
        raise SystemExit(reason)  # an Exception would be swallowed
    try:
        backend.add_choice()
        _hook_classes(lambda: _raise(reason))
    except Exception:  # then the name is unknown to SGLang, which refuses it
        log.exception("the reason above cannot be shown where the backend is used")


def _raise(reason: str) -> dict[str, type]:
    raise PluginError(reason)


def _asked_for(argv: list[str]) -> bool:
    return any(
        arg.endswith(f"={backend.NAME}") or following == backend.NAME
        for arg, following in zip(argv, [*argv[1:], ""], strict=True)
        if arg.startswith("--disaggregation-transfer-backend")
    )


def _install() -> None:
    import sglang.version

    check_version(sglang.version.__version__)
    _check_targets()
    backend.add_choice()
    _hook_classes(_classes)
    _hook_queues()


def _check_targets() -> None:
    """SGLang only logs a hook whose target is gone."""
    for target in (GET_CLASS, *_queue_hooks()):
        try:
            pkgutil.resolve_name(target)
        except (AttributeError, ImportError) as error:
            raise PluginError(f"it has no {target!r} to hook into ({error})") from error


def check_applied() -> None:
    """SGLang only logs a hook that it could not apply, too, and skips one whose target it has wrapped before.

    Raises:
        PluginError: a server would start without pools, or leave out what requests ask for.
    """
    for target, hook in _queue_hooks().items():
        if not _wraps(pkgutil.resolve_name(target), hook):
            raise PluginError(
                f"SGLang did not apply kvserve's hook of {target!r}; its log has the reason, which may be another"
                " plugin that hooks the same method"
            )


def _wraps(found: Any, hook: Callable[..., Any]) -> bool:
    """Whether ``hook`` is in one of the layers that SGLang's registry put around a function."""
    while inspect.isfunction(found):
        if inspect.getclosurevars(found).nonlocals.get("hook") is hook:
            return True
        found = getattr(found, "__wrapped__", None)
    return False


def _queue_hooks() -> dict[str, Callable[..., Any]]:
    """What runs after which method."""
    from kvserve_sglang import hooks

    return {
        f"{PREFILL_QUEUE}._init_kv_manager": hooks.bind_manager,
        f"{DECODE_QUEUE}._init_kv_manager": hooks.bind_manager,
        f"{PREFILL_QUEUE}.finalize_bootstrap": hooks.describe_request,
    }


def _classes() -> dict[str, type]:
    from kvserve_sglang.manager import KVServeBootstrapServer, KVServeManager
    from kvserve_sglang.receiver import KVServeReceiver
    from kvserve_sglang.sender import KVServeSender

    return {
        "manager": KVServeManager,
        "sender": KVServeSender,
        "receiver": KVServeReceiver,
        "bootstrap_server": KVServeBootstrapServer,
    }


def _hook_classes(classes: Callable[[], dict[str, type]]) -> None:
    from sglang.srt.disaggregation.utils import TransferBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    member = backend.add_member(TransferBackend)
    HookRegistry.register(GET_CLASS, backend.class_hook(member, classes), HookType.AROUND)


def _hook_queues() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in _queue_hooks().items():
        HookRegistry.register(target, hook, HookType.AFTER)
