"""What a model's cache is, from its Hugging Face folder alone, so that every engine says the same of it."""

from kvserve_core.model.identity import model_id
from kvserve_core.model.rope import SLIDING
from kvserve_core.model.spec import FULL, kv_spec, layer_types, text_config

__all__ = ["FULL", "SLIDING", "kv_spec", "layer_types", "model_id", "text_config"]
