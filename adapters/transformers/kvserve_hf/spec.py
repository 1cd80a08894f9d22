"""The :class:`KVSpec` of what the reference engine runs: models with one K and one V cache per layer."""

from __future__ import annotations

from typing import Any

from kvserve_core import model
from kvserve_core.errors import UnsupportedSpecError
from kvserve_core.model.spec import is_mla
from kvserve_core.spec import DType, KVSpec


def kv_spec(model_config: Any, dtype: DType, model_id: str) -> KVSpec:
    """The cache of a model, from its transformers config.

    Raises:
        UnsupportedSpecError: a cache that is not one K and one V per layer (MLA, shared layers, state-space layers).
    """
    config = model_config.get_text_config(decoder=True).to_dict()
    if is_mla(config):
        raise UnsupportedSpecError(
            f"model type {config['model_type']!r} has a latent cache (MLA); the reference engine takes models with one"
            " K and one V cache per layer"
        )
    return model.kv_spec(config, dtype, model_id)
