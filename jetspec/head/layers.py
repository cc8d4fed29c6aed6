"""The building blocks of a draft head: a Qwen3-style decoder layer whose attention is left to the caller."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from jetspec.head.config import HeadConfig

Rotation = tuple[Tensor, Tensor]


class Rotary:
    """Rotary angles. Frequencies stay float32 on any module dtype, so they are no buffer of a module."""

    def __init__(self, config: HeadConfig) -> None:
        with torch.device("cpu"):
            embedding = Qwen3RotaryEmbedding(
                Qwen3Config(
                    hidden_size=config.hidden_size,
                    num_attention_heads=config.num_attention_heads,
                    head_dim=config.head_dim,
                    max_position_embeddings=config.max_position_embeddings,
                    rope_parameters=dict(config.rope_parameters),
                )
            )
        self._frequencies: Tensor = embedding.inv_freq.float()
        self._scaling = embedding.attention_scaling

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Cosines and sines [n, 1, head_dim] for positions [n]."""
        if self._frequencies.device != positions.device:
            self._frequencies = self._frequencies.to(positions.device)
        angles = positions[:, None].float() * self._frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return (angles.cos() * self._scaling).to(dtype), (angles.sin() * self._scaling).to(dtype)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the halves of the last dimension of x [.., n, heads, head_dim]."""
    cos, sin = rotation
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class HeadAttention(nn.Module):
    """Projections of one attention layer; queries and keys are normed over head_dim, then rotated."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=bias)
        self.q_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)

    def queries(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Queries [n, heads, head_dim] of x [n, hidden]."""
        return rotate(self.q_norm(self._split(self.q_proj(x))), rotation)

    def keys_values(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Keys and values, each [n, kv_heads, head_dim], of x [n, hidden]."""
        return rotate(self.k_norm(self._split(self.k_proj(x))), rotation), self._split(self.v_proj(x))

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], x.shape[-1] // self.head_dim, self.head_dim)


class HeadMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The MLP of x [n, hidden]: [n, hidden]."""
        output: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class HeadLayer(nn.Module):
    """A pre-norm decoder layer."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.self_attn = HeadAttention(config)
        self.mlp = HeadMLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Residual stream x [n, hidden] after attention output [n, heads, head_dim] and the MLP."""
        x = x + self.self_attn.o_proj(attended.flatten(1))
        output: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output
