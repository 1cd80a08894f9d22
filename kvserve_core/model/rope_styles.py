"""Which way a model type rotates: a table, as its config does not say. Tests compare it with transformers' own code."""

# fmt: off
PAIRS = frozenset({
    "blt", "cohere", "cohere2", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "ernie4_5",
    "ernie4_5_moe", "glm", "glm4", "helium",
})
"""Model types whose caches hold keys rotated in neighbouring pairs (``gptj``)."""
HALVES = frozenset({
    "afmoe", "apertus", "arcee", "bamba", "bitnet", "cwm", "dbrx", "diffllama", "doge", "dots1", "exaone4", "falcon",
    "falcon_h1", "flex_olmo", "gemma", "gemma2", "gemma3", "gemma3_text", "glm4_moe", "gpt_neox", "granite",
    "granitemoe", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_dense", "hunyuan_v1_moe", "internlm3", "jamba",
    "jetmoe", "lfm2", "lfm2_moe", "llama", "ministral", "ministral3", "mistral", "mixtral", "nemotron", "nemotron_h",
    "olmo", "olmo2", "olmo3", "olmoe", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe", "qwen3_next", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "vaultgemma",
})
"""Model types whose caches hold keys rotated by halves (``neox``)."""
# fmt: on
