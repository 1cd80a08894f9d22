"""A tiny seeded Llama with a byte tokenizer. Its tokens vary: an initial deviation of 0.12 sees to that."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 0


def make_llama(folder: Path, seed: int = SEED) -> Path:
    """Four layers, eight query heads, four KV heads of 64; weights in float32."""
    if (folder / "config.json").exists():
        return folder
    tokenizer().save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=4096,
        initializer_range=0.12,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *alphabet])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
