"""What every draft head is: decoder layers between the target's tapped hidden states and its lm_head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from jetspec.attention.cache import KVCache
from jetspec.head.config import HeadConfig
from jetspec.head.layers import HeadLayer, Rotary

if TYPE_CHECKING:
    pass

KeysValues = tuple[Tensor, Tensor]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Embed = Callable[[Tensor], Tensor]


class DraftHead(nn.Module, ABC):
    """Parts and sizes that the kinds of heads share; embedding and lm_head are the target's."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.num_aux_layers * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        layers = nn.ModuleList(HeadLayer(config) for _ in range(config.num_hidden_layers))
        self.layers = cast("list[HeadLayer]", layers)
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config)

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes that the head keeps for one committed token."""
        config = self.config
        numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        return numbers * self.dtype.itemsize

    def new_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Storage for context keys and values, addressed by the target's own block tables."""
        shape = (self.config.num_key_value_heads, self.config.head_dim)
        return KVCache([shape] * self.config.num_hidden_layers, num_blocks, block_size, self.dtype, self.device)

    @abstractmethod
    def forward_text(self, aux_hidden_states: Tensor, token_ids: Tensor, anchors: Tensor, embed: Embed) -> Tensor:
        """Drafts behind many anchors of one known text, differentiably; equal to what the head drafts in use.

        aux_hidden_states [n, aux_layers * hidden] are of its first positions, up to the last anchor at least; token_ids
        [T] the whole text; anchors [A] positions of at least 1; embed the target's embedding. A draft sees those before
        its anchor. Returns hidden states [A, block_size - 1, hidden], ready for the target's lm_head: the one at
        (a, d - 1) predicts the token d places after anchor a. What is predicted from behind the text means nothing.
        """

    @torch.no_grad()
    def read_last_aux_hidden_state(self) -> None:
        """Set the weights before the layers so that these read the last tap as it is."""
        self.fc.weight.zero_()
        self.fc.weight[:, -self.config.hidden_size :].fill_diagonal_(1.0)

    @property
    def _scaling(self) -> float:
        return self.config.head_dim**-0.5

    def _decode(
        self, x: Tensor, positions: Tensor, attend: Attend, layers: Iterable[HeadLayer] | None = None
    ) -> Tensor:
        """Run rows x [n, hidden] at positions [n] through layers (None: all); what they see is up to `attend`."""
        rotation = self.rotary(positions, self.dtype)
        for index, layer in enumerate(self.layers if layers is None else layers):
            y = layer.input_layernorm(x)
            q = layer.self_attn.queries(y, rotation)
            k, v = layer.self_attn.keys_values(y, rotation)
            x = layer.finish(x, attend(index, q, k, v))
        return x


def block_tokens(token_ids: Tensor, anchors: Tensor, length: int) -> Tensor:
    """The tokens [A, length] from each anchor [A] on; behind the end of token_ids [T], its last one."""
    places = anchors[:, None] + torch.arange(length, device=anchors.device)
    return token_ids[places.clamp(max=len(token_ids) - 1)]
