"""kvserve: KV-cache compression for disaggregated LLM serving, in which every stage is a plugin.

Names are loaded when first used, so that listing components does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvserve_core.artefacts import Artefacts as Artefacts
    from kvserve_core.component import Capabilities as Capabilities
    from kvserve_core.component import Component as Component
    from kvserve_core.component import ComponentConfig as ComponentConfig
    from kvserve_core.component import ComponentSpec as ComponentSpec
    from kvserve_core.component import Tunable as Tunable
    from kvserve_core.controller import Controller as Controller
    from kvserve_core.errors import KVServeError as KVServeError
    from kvserve_core.evaluator import Evaluator as Evaluator
    from kvserve_core.hookspecs import hookimpl as hookimpl
    from kvserve_core.library import Profile as Profile
    from kvserve_core.library import ProfileLibrary as ProfileLibrary
    from kvserve_core.pipeline import Pipeline as Pipeline
    from kvserve_core.policy import Policy as Policy
    from kvserve_core.profile import Chain as Chain
    from kvserve_core.profile import PipelineSpec as PipelineSpec
    from kvserve_core.registry import Registry as Registry
    from kvserve_core.registry import default_registry as default_registry
    from kvserve_core.session import Consumer as Consumer
    from kvserve_core.session import Producer as Producer
    from kvserve_core.settings import Settings as Settings
    from kvserve_core.settings import load_settings as load_settings
    from kvserve_core.spec import DType as DType
    from kvserve_core.spec import KVSpec as KVSpec
    from kvserve_core.spec import LayerGroup as LayerGroup
    from kvserve_core.spec import PlanePart as PlanePart
    from kvserve_core.spec import PlaneSpec as PlaneSpec
    from kvserve_core.spec import Region as Region
    from kvserve_core.spec import Shard as Shard
    from kvserve_core.stages import Codec as Codec
    from kvserve_core.stages import Quantizer as Quantizer
    from kvserve_core.stages import Transform as Transform
    from kvserve_core.tensor import Encoded as Encoded
    from kvserve_core.tensor import Part as Part
    from kvserve_core.tensor import Quantized as Quantized
    from kvserve_core.transport import Store as Store
    from kvserve_core.transport import Transport as Transport
    from kvserve_core.workload import WorkloadClassifier as WorkloadClassifier

_HOME = {
    "artefacts": ["Artefacts"],
    "component": ["Capabilities", "Component", "ComponentConfig", "ComponentSpec", "Tunable"],
    "controller": ["Controller"],
    "errors": ["KVServeError"],
    "evaluator": ["Evaluator"],
    "hookspecs": ["hookimpl"],
    "library": ["Profile", "ProfileLibrary"],
    "pipeline": ["Pipeline"],
    "policy": ["Policy"],
    "profile": ["Chain", "PipelineSpec"],
    "registry": ["Registry", "default_registry"],
    "session": ["Consumer", "Producer"],
    "settings": ["Settings", "load_settings"],
    "spec": ["DType", "KVSpec", "LayerGroup", "PlanePart", "PlaneSpec", "Region", "Shard"],
    "stages": ["Codec", "Quantizer", "Transform"],
    "tensor": ["Encoded", "Part", "Quantized"],
    "transport": ["Store", "Transport"],
    "workload": ["WorkloadClassifier"],
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}
__all__ = sorted(_MODULE)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module 'kvserve_core' has no attribute {name!r}")
    value = getattr(import_module(f"kvserve_core.{_MODULE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
