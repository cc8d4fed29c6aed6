"""The EAGLE-3 head: an autoregressive head whose first layer reads a token and a feature side by side."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from jetspec.head.autoregressive import AutoregressiveHead, Paths
from jetspec.head.base import DraftHead
from jetspec.head.config import HeadConfig
from jetspec.head.layers import HeadAttention, HeadLayer
from jetspec.head.options import Eagle3Config


class PairNorm(nn.Module):
    """Normalises the two halves of entries [n, 2 * hidden]: the token's embedding and the feature."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.embed = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.feature = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, entries: Tensor) -> Tensor:
        """Normalised entries [n, 2 * hidden]."""
        embeds, features = entries.chunk(2, dim=-1)
        return torch.cat((self.embed(embeds), self.feature(features)), dim=-1)


class PairLayer(HeadLayer):
    """The first layer: attention reads both halves of an entry, the residual stream is the feature alone."""

    def __init__(self, config: HeadConfig, options: Eagle3Config) -> None:
        super().__init__(config)
        attention, width, bias = self.self_attn, 2 * config.hidden_size, config.attention_bias
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow: nn.Linear = getattr(attention, name)
            setattr(attention, name, nn.Linear(width, narrow.out_features, bias=bias))
        self.input_layernorm: PairNorm = PairNorm(config)  # type: ignore[assignment]
        self.norm_before_residual = options.norm_before_residual

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The feature of entries x [n, 2 * hidden] after attention output [n, heads, head_dim] and the MLP."""
        feature = x.chunk(2, dim=-1)[1]
        if self.norm_before_residual:
            feature = self.input_layernorm.feature(feature)
        return super().finish(feature, attended)


class Eagle3Head(AutoregressiveHead):
    """An EAGLE-3 head as it is published: with an lm_head of its own, mostly of a reduced vocabulary.

    Source: EAGLE-3 (Li et al., 2025, arXiv 2503.01840). The layer is that of SafeAILab/EAGLE, eagle/model/cnets.py
    (LlamaDecoderLayeremb); the variants are those of vllm-project/speculators, src/speculators/models/eagle3/core.py
    and model_definitions.py (qk_norm by the Qwen3 layer, norm_before_residual, norm_before_fc, fc_norm, norm_output).
    """

    def __init__(self, config: HeadConfig) -> None:
        DraftHead.__init__(self, config)
        assert config.eagle3 is not None  # the configuration sees to it
        self.options = config.eagle3
        aux, size = config.num_aux_layers, config.aux_hidden_size
        del self.hidden_norm
        self.fc = nn.Linear(aux * size, config.hidden_size, bias=False)
        if self.options.aux_norm == "each":
            self.fc_norm = nn.ModuleList(nn.RMSNorm(size, config.rms_norm_eps) for _ in range(aux))
        elif self.options.aux_norm == "joint":
            self.input_norm = nn.RMSNorm(aux * size, config.rms_norm_eps)
        self.layers[0] = PairLayer(config, self.options)
        for layer in self.layers:
            if not self.options.qk_norm:
                _drop_qk_norm(layer.self_attn)

    def features(self, aux_hidden_states: Tensor) -> Tensor:
        """Aux hidden states [n, aux_layers * target_hidden] -> features [n, hidden]."""
        states = aux_hidden_states.to(self.dtype)
        if self.options.aux_norm == "each":
            parts = states.chunk(len(self.fc_norm), dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        elif self.options.aux_norm == "joint":
            states = self.input_norm(states)
        features: Tensor = self.fc(states)
        return features

    def forward_level(self, features: Tensor, embeds: Tensor, paths: Paths, parents: Tensor) -> Tensor:
        """See `AutoregressiveHead.forward_level`."""
        hidden = super().forward_level(features, embeds, paths, parents)
        return self.norm(hidden) if self.options.norm_output else hidden

    def output(self, hidden: Tensor) -> Tensor:
        """See `AutoregressiveHead.output`."""
        return hidden if self.options.norm_output else super().output(hidden)

    def _entries(self, features: Tensor, embeds: Tensor) -> Tensor:
        """Entries [.., 2 * hidden], which the first layer normalises."""
        return torch.cat((embeds.to(self.dtype), features), dim=-1)


def _drop_qk_norm(attention: HeadAttention) -> None:
    attention.q_norm = nn.Identity()  # type: ignore[assignment]
    attention.k_norm = nn.Identity()  # type: ignore[assignment]
