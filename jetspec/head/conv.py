"""A parallel head with convolutions along the block around attention and MLP, as DFlash 2 heads have them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from jetspec.head.base import Attend
from jetspec.head.config import HeadConfig
from jetspec.head.layers import HeadLayer
from jetspec.head.options import DFlash2Config
from jetspec.head.parallel import ParallelHead

if TYPE_CHECKING:
    from jetspec.models.target import Target


class BlockConv(nn.Module):
    """Two causal convolutions along a block, before and behind one part of a layer.

    Their kernels are a fixed one for every channel plus one for every group of channels, which is computed from the
    part's input at the same position.

    Source: vllm-project/vllm, vllm/model_executor/models/qwen3_dflash2.py (DFlashGroupedConv).
    """

    def __init__(self, config: HeadConfig, options: DFlash2Config) -> None:
        super().__init__()
        self.taps, self.groups = options.kernel_size, config.hidden_size // options.group_size
        self.base_kernel = nn.Parameter(torch.empty(2, self.taps, config.hidden_size))
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.taps * self.groups, bias=False)

    def before(self, x: Tensor, block_rows: int) -> tuple[Tensor, Tensor]:
        """The convolved input of the part, for x [blocks * block_rows, hidden], and the kernels behind the part."""
        kernels = self.kernel_projection(x).view(len(x), 2, self.taps, self.groups)
        return self._convolve(x, kernels[:, 0], 0, block_rows), kernels[:, 1]

    def behind(self, x: Tensor, kernels: Tensor, block_rows: int) -> Tensor:
        """The convolved output x [blocks * block_rows, hidden] of the part."""
        return self._convolve(x, kernels, 1, block_rows)

    def _convolve(self, x: Tensor, kernels: Tensor, side: int, block_rows: int) -> Tensor:
        grouped = x.view(-1, block_rows, self.groups, x.shape[-1] // self.groups)
        weights = self.base_kernel[side].view(self.taps, self.groups, -1) + kernels.unsqueeze(-1)
        weights = weights.view(-1, block_rows, self.taps, self.groups, grouped.shape[-1])
        output = torch.zeros_like(grouped)
        for tap in range(min(self.taps, block_rows)):
            earlier = functional.pad(grouped[:, : block_rows - tap], (0, 0, 0, 0, tap, 0))
            output = output + weights[:, :, tap] * earlier
        return output.reshape(x.shape)


class ConvLayer(HeadLayer):
    """A decoder layer with convolutions around its attention and its MLP."""

    def __init__(self, config: HeadConfig, options: DFlash2Config) -> None:
        super().__init__(config)
        self.attention_conv = BlockConv(config, options)
        self.mlp_conv = BlockConv(config, options)


class ConvParallelHead(ParallelHead):
    """A parallel head of `ConvLayer`s; the context's keys and values are those of any parallel head."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        assert config.dflash2 is not None  # whoever makes the head sees to it
        self.options = config.dflash2
        layers = nn.ModuleList(ConvLayer(config, self.options) for _ in range(config.num_hidden_layers))
        self.layers = cast("list[HeadLayer]", layers)

    def embed(self, ids: Tensor, target: Target) -> Tensor:
        """See `DraftHead.embed`."""
        return super().embed(ids, target) * self.options.embedding_scale

    def logits(self, hidden: Tensor, target: Target) -> Tensor:
        """See `DraftHead.logits`."""
        logits = super().logits(hidden, target).float() * self.options.logit_scale
        cap = self.options.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _decode(
        self, x: Tensor, positions: Tensor, attend: Attend, layers: Iterable[HeadLayer] | None = None
    ) -> Tensor:
        """See `DraftHead._decode`; rows x [blocks * block_rows, hidden] are whole blocks."""
        rotation = self.rotary(positions, self.dtype)
        rows = self.config.block_rows
        for index, layer in enumerate(self.layers if layers is None else layers):
            assert isinstance(layer, ConvLayer)
            y, kernels = layer.attention_conv.before(layer.input_layernorm(x), rows)
            q = layer.self_attn.queries(y, rotation)
            k, v = layer.self_attn.keys_values(y, rotation)
            attended = layer.self_attn.o_proj(attend(index, q, k, v).flatten(1))
            x = x + layer.attention_conv.behind(attended, kernels, rows)
            y, kernels = layer.mlp_conv.before(layer.post_attention_layernorm(x), rows)
            x = x + layer.mlp_conv.behind(layer.mlp(y), kernels, rows)
        return x
