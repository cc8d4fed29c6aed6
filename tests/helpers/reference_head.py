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


class Layer:
    """One decoder layer, row by row; keys and values of row p are those of position p."""

    def __init__(self, config: HeadConfig, weights: dict[str, Tensor], index: int) -> None:
        prefix = f"layers.{index}."
        self.weights = {n.removeprefix(prefix): t.double() for n, t in weights.items() if n.startswith(prefix)}
        self.config, self.window = config, config.windows[index]

    def norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], self.config.rms_norm_eps)

    def heads(self, name: str, row: Tensor) -> list[Tensor]:
        return list((self.weights[f"self_attn.{name}_proj.weight"] @ row).split(self.config.head_dim))

    def rotated(self, name: str, row: Tensor, position: int) -> list[Tensor]:
        theta = self.config.rope_theta
        return [rope(self.norm(f"self_attn.{name}_norm", h), position, theta) for h in self.heads(name, row)]

    def keys_values(self, rows: list[Tensor]) -> tuple[list, list]:
        return [self.rotated("k", row, p) for p, row in enumerate(rows)], [self.heads("v", row) for row in rows]

    def attend(self, row: Tensor, position: int, keys: list, values: list, causal: bool) -> Tensor:
        seen = [
            p
            for p in range(len(keys))
            if (p <= position or not causal) and (self.window is None or p > position - self.window)
        ]
        attended = []
        for h, q in enumerate(self.rotated("q", row, position)):
            kv = h // (self.config.num_attention_heads // self.config.num_key_value_heads)
            scores = torch.stack([q @ keys[p][kv] for p in seen]) / math.sqrt(self.config.head_dim)
            attended.append(sum(p * values[s][kv] for p, s in zip(scores.softmax(0), seen)))
        return self.weights["self_attn.o_proj.weight"] @ torch.cat(attended)

    def mlp(self, x: Tensor) -> Tensor:
        y = self.norm("post_attention_layernorm", x)
        gate = self.weights["mlp.gate_proj.weight"] @ y
        return self.weights["mlp.down_proj.weight"] @ (
            gate * torch.sigmoid(gate) * (self.weights["mlp.up_proj.weight"] @ y)
        )


def reference_hidden(
    config: HeadConfig, weights: dict[str, Tensor], aux_hidden_states: Tensor, block: Tensor, anchor: int
) -> Tensor:
    """aux_hidden_states [>= anchor, aux_layers * hidden], block [B, hidden] from position anchor on -> [B, hidden]."""
    eps = config.rms_norm_eps
    fc, hidden_norm, norm = (weights[f"{name}.weight"].double() for name in ("fc", "hidden_norm", "norm"))
    context = [rms_norm(fc @ row, hidden_norm, eps) for row in aux_hidden_states[:anchor].double()]
    x = list(block.double())
    for index in range(config.num_hidden_layers):
        layer = Layer(config, weights, index)
        normed = [layer.norm("input_layernorm", row) for row in x]
        keys, values = layer.keys_values(context + normed)
        for i, row in enumerate(normed):
            x[i] = x[i] + layer.attend(row, anchor + i, keys, values, config.causal)
            x[i] = x[i] + layer.mlp(x[i])
    return torch.stack([rms_norm(row, norm, eps) for row in x]).float()


def reference_path(config: HeadConfig, weights: dict[str, Tensor], aux_hidden_states: Tensor, tokens: Tensor) -> Tensor:
    """The autoregressive head along one path, everything anew for every token.

    aux_hidden_states [n, aux_layers * hidden] of the committed tokens, n >= 1; tokens [n + 1 + d, hidden] embed
    those, of the anchor and of d drafted tokens. Returns [1 + d, hidden], the states that predict depths 1 .. d + 1.
    """
    eps = config.rms_norm_eps
    names = ("fc", "hidden_norm", "embed_norm", "input_proj", "norm")
    fc, hidden_norm, embed_norm, input_proj, norm = (weights[f"{name}.weight"].double() for name in names)
    features = [fc @ row for row in aux_hidden_states.double()]
    predictions = []
    for _ in range(len(aux_hidden_states), len(tokens)):
        x = []
        for feature, token in zip(features, tokens[1:].double()):
            x.append(input_proj @ torch.cat((rms_norm(token, embed_norm, eps), rms_norm(feature, hidden_norm, eps))))
        for index in range(config.num_hidden_layers):
            layer = Layer(config, weights, index)
            normed = [layer.norm("input_layernorm", row) for row in x]
            keys, values = layer.keys_values(normed)
            for i, row in enumerate(normed):
                x[i] = x[i] + layer.attend(row, i, keys, values, causal=True)
                x[i] = x[i] + layer.mlp(x[i])
        features.append(x[-1])
        predictions.append(rms_norm(x[-1], norm, eps))
    return torch.stack(predictions).float()
