"""Tiny models of families whose layers are not all plain attention with keys and values of one size."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.helpers.tiny import BASE, VOCAB_SIZE, randomize

GATED_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
MAMBA = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
NEMOTRON = {
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 8,
    "chunk_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
}

LATENT = {  # the latent attention of DeepSeek: keys of width 20, values of width 10
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
}
LLAMA4 = {
    "intermediate_size_mlp": 64,
    "num_local_experts": 4,
    "attention_chunk_size": 8,
    "floor_scale": 4,  # the temperature of a position changes with every fourth one
    "no_rope_layers": [1, 0, 1, 0],
}
GEMMA4 = {
    "global_head_dim": 16,
    "sliding_window": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_kv_shared_layers": 2,
}

#: What a family needs beside the common sizes, and its kinds of layers: they repeat, the last one attends.
FAMILIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "qwen3_next": ({**GATED_DELTA, **EXPERTS}, ("linear_attention", "full_attention")),
    "qwen3_5_text": (GATED_DELTA, ("linear_attention", "full_attention")),
    "qwen3_5_moe_text": ({**GATED_DELTA, **EXPERTS}, ("linear_attention", "full_attention")),
    "olmo_hybrid": ({**GATED_DELTA, "linear_num_key_heads": 4}, ("linear_attention", "full_attention")),
    "nemotron_h": (NEMOTRON, ("linear_attention", "full_attention", "moe")),
    "granitemoehybrid": (
        {**MAMBA, "num_local_experts": 4, "shared_intermediate_size": 32},
        ("linear_attention", "full_attention"),
    ),
    "falcon_h1": ({**MAMBA, "mamba_d_ssm": 96, "ssm_out_multiplier": 0.1}, ()),
    "bamba": (MAMBA, ("linear_attention", "full_attention")),
    "lfm2": ({"block_auto_adjust_ff_dim": False}, ("conv", "full_attention")),
    "deepseek_v2": (LATENT, ()),
    "deepseek_v3": (LATENT, ()),
    "glm4_moe_lite": (LATENT, ()),
    "llama4_text": (LLAMA4, ("chunked_attention", "full_attention", "chunked_attention", "full_attention")),
    "gemma4_text": (GEMMA4, ("sliding_attention", "full_attention", "sliding_attention", "full_attention")),
    "lfm2_moe": ({**EXPERTS, "num_dense_layers": 1}, ("conv", "full_attention")),
}


def tiny_family_model(
    family: str, seed: int = 0, attn: str | None = "eager", num_hidden_layers: int = 4, **settings: Any
) -> PreTrainedModel:
    own, kinds = FAMILIES[family]
    known = AutoConfig.for_model(family)
    sizes = {"vocab_size": VOCAB_SIZE, **BASE, **own, "num_hidden_layers": num_hidden_layers}
    sizes = {name: value for name, value in sizes.items() if name in own or hasattr(type(known), name)}
    if own is LATENT:  # there the width of a head follows from its parts
        sizes.pop("head_dim", None)
    if kinds:
        layers = [kinds[index % len(kinds)] for index in range(num_hidden_layers)]
        sizes["layers_block_type" if family == "nemotron_h" else "layer_types"] = layers
    if family == "nemotron_h":
        del sizes["num_hidden_layers"]
    if family == "bamba":
        del sizes["layer_types"]
        sizes["attn_layer_indices"] = [i for i in range(num_hidden_layers) if kinds[i % 2] == "full_attention"]
    config = AutoConfig.for_model(family, **{**sizes, **settings})
    config._attn_implementation = attn
    config.dtype = torch.float32
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return randomize(AutoModelForCausalLM.from_config(config), seed)


FAMILY_MODELS = {family: partial(tiny_family_model, family) for family in FAMILIES}
RECURRENT = frozenset(FAMILIES) - {"deepseek_v2", "deepseek_v3", "glm4_moe_lite", "llama4_text", "gemma4_text"}
