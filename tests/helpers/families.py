"""Tiny models of many transformers families, whatever they call the fields of their configs."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 48),
    **dict.fromkeys(("intermediate_size", "ffn_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 6),
    **dict.fromkeys(("num_attention_heads", "n_head"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
    "num_key_value_heads": 2,
    "rotary_dim": 6,
    "vocab_size": 128,
    "word_embed_proj_dim": 48,
}


def tiny_family(model_type: str, **settings: object) -> PreTrainedModel:
    """A random model of a family, with 6 layers of width 48, 4 heads and 128 tokens."""
    known = AutoConfig.for_model(model_type)
    sizes = {name: size for name, size in SIZES.items() if hasattr(known, name)}
    config = AutoConfig.for_model(model_type, **{**sizes, **settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
