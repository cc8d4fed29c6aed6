"""Tiny random draft heads whose outputs react to everything they may see."""

from __future__ import annotations

import math
from typing import Any

import torch

from jetspec.head import HeadConfig, ParallelHead, new_head

SETTINGS: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "block_size": 5,
    "num_target_layers": 6,
    "mask_token_id": 63,
    "target_layer_ids": (1, 3),
    "causal": True,
}
WINDOWED = {"sliding_window": 4, "layer_types": ("sliding_attention", "full_attention")}


def tiny_config(**settings: Any) -> HeadConfig:
    return HeadConfig(**{**SETTINGS, **settings})


def tiny_head(seed: int = 0, **settings: Any) -> ParallelHead:
    head = new_head(tiny_config(**settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 2:
                parameter.copy_(noise * 1.5 / math.sqrt(parameter.shape[1]))
            else:
                parameter.copy_(1 + 0.2 * noise)
    return head.eval()


def random_aux_hidden_states(head: ParallelHead, rows: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, head.config.num_aux_layers * head.config.hidden_size, generator=generator)
