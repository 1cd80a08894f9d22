"""The conformance kit: what every component must do, as plain functions, pytest classes and ``kvserve check``.

Names are loaded when first used: neither pytest nor torch is imported before that. pytest is needed for the classes
only.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvserve_core.testing.catalogue import checks_for as checks_for
    from kvserve_core.testing.check import Check as Check
    from kvserve_core.testing.check import Result as Result
    from kvserve_core.testing.check import result as result
    from kvserve_core.testing.subject import CheckFailed as CheckFailed
    from kvserve_core.testing.subject import Skipped as Skipped
    from kvserve_core.testing.subject import Subject as Subject
    from kvserve_core.testing.suites import CodecTests as CodecTests
    from kvserve_core.testing.suites import PolicyTests as PolicyTests
    from kvserve_core.testing.suites import QuantizerTests as QuantizerTests
    from kvserve_core.testing.suites import TransformTests as TransformTests
    from kvserve_core.testing.suites import TransportTests as TransportTests

_HOME = {
    "catalogue": ["checks_for"],
    "check": ["Check", "Result", "result"],
    "subject": ["CheckFailed", "Skipped", "Subject"],
    "suites": ["CodecTests", "PolicyTests", "QuantizerTests", "TransformTests", "TransportTests"],
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}
__all__ = sorted(_MODULE)


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module 'kvserve_core.testing' has no attribute {name!r}")
    return getattr(import_module(f"kvserve_core.testing.{_MODULE[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
