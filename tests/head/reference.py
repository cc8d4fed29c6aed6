"""A slow, readable draft head: one sequence, no cache, plain loops, written from the published format alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jetspec.head import HeadConfig


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def rope(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotate pairs (i, i + d/2) of one head's vector x [d] by position / theta^(2i/d)."""
    half = len(x) // 2
    angles = [position / theta ** (2 * i / len(x)) for i in range(half)]
    cos = torch.tensor([math.cos(a) for a in angles]).double()
    sin = torch.tensor([math.sin(a) for a in angles]).double()
    return torch.cat((x[:half] * cos - x[half:] * sin, x[half:] * cos + x[:half] * sin))


def reference_hidden(
    config: HeadConfig, weights: dict[str, Tensor], taps: Tensor, block: Tensor, anchor: int
) -> Tensor:
    """taps [>= anchor, num_taps * hidden], block [B, hidden] at positions anchor .. anchor + B - 1 -> [B, hidden]."""
    eps, d = config.rms_norm_eps, config.head_dim
    weights = {name: tensor.double() for name, tensor in weights.items()}
    context = [
        rms_norm(weights["fc.weight"] @ row, weights["hidden_norm.weight"], eps) for row in taps[:anchor].double()
    ]
    x = list(block.double())
    for layer in range(config.num_hidden_layers):
        w = {
            name.removeprefix(f"layers.{layer}."): t
            for name, t in weights.items()
            if name.startswith(f"layers.{layer}.")
        }
        normed = [rms_norm(row, w["input_layernorm.weight"], eps) for row in x]
        rows = context + normed
        keys, values = [], []
        for position, row in enumerate(rows):
            k = (w["self_attn.k_proj.weight"] @ row).split(d)
            keys.append([rope(rms_norm(h, w["self_attn.k_norm.weight"], eps), position, config.rope_theta) for h in k])
            values.append((w["self_attn.v_proj.weight"] @ row).split(d))
        for i, row in enumerate(normed):
            position, heads = anchor + i, []
            for h, q in enumerate((w["self_attn.q_proj.weight"] @ row).split(d)):
                q = rope(rms_norm(q, w["self_attn.q_norm.weight"], eps), position, config.rope_theta)
                kv = h // (config.num_attention_heads // config.num_key_value_heads)
                window = config.windows[layer]
                seen = [
                    p
                    for p in range(len(rows))
                    if (p <= position or not config.causal) and (window is None or p > position - window)
                ]
                scores = torch.stack([q @ keys[p][kv] for p in seen]) / math.sqrt(d)
                heads.append(sum(p * values[s][kv] for p, s in zip(scores.softmax(0), seen)))
            x[i] = x[i] + w["self_attn.o_proj.weight"] @ torch.cat(heads)
            y = rms_norm(x[i], w["post_attention_layernorm.weight"], eps)
            gate = w["mlp.gate_proj.weight"] @ y
            x[i] = x[i] + w["mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * (w["mlp.up_proj.weight"] @ y))
    return torch.stack([rms_norm(row, weights["norm.weight"], eps) for row in x]).float()
