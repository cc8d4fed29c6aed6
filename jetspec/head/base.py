"""What every draft head is: decoder layers between hidden states of the target's layers and its lm_head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from jetspec.attention.cache import KVCache
from jetspec.errors import JetSpecError
from jetspec.head.config import HeadConfig
from jetspec.head.layers import HeadLayer, Rotary

if TYPE_CHECKING:
    from jetspec.models.target import Target


KeysValues = tuple[Tensor, Tensor]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Embed = Callable[[Tensor], Tensor]


class DraftHead(nn.Module, ABC):
    """Parts and sizes that the kinds of heads share; embedding and lm_head are the target's, or the head's own."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.num_aux_layers * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        layers = nn.ModuleList(HeadLayer(config) for _ in range(config.num_hidden_layers))
        self.layers = cast("list[HeadLayer]", layers)
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config)
        own = config.draft_vocab_size
        self.lm_head = None if own is None else nn.Linear(config.hidden_size, own, bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if config.own_embedding else None
        self.token_ids: Tensor | None
        self.register_buffer("token_ids", torch.empty(own or 0, dtype=torch.int64) if config.reduced_vocab else None)
        #: Whose file layout the head was read from.
        self.layout = "JetSpec"

    @property
    def dtype(self) -> torch.dtype:
        """The number type of the weights."""
        return self.fc.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
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

    def validate_for(self, target: Target) -> None:
        """Check that this head can draft for `target`.

        Raises:
            JetSpecError: its sizes, its tokens or its device are other ones. The message names the field and the fix.
        """
        self.config.validate_for(target)
        if self.token_ids is not None and int(self.token_ids.max()) >= target.num_embeddings:
            raise JetSpecError(
                f"the draft head proposes token {int(self.token_ids.max())}, but the target embeds only "
                f"{target.num_embeddings} tokens: use the head that was trained for this target"
            )
        if self.device != target.device:
            raise JetSpecError(
                f"the draft head's device is {self.device}, the target's is {target.device}: load the head with "
                f"load_head(..., device={str(target.device)!r}), or move it with head.to({str(target.device)!r})"
            )

    def embed(self, ids: Tensor, target: Target) -> Tensor:
        """Embeddings [.., hidden] of the target's token ids [..]: the head's own, or else the target's."""
        if self.embed_tokens is None:
            return target.embed(ids)
        embeddings: Tensor = self.embed_tokens(ids.to(self.device))
        return embeddings

    def share_weights(self, target: Target) -> None:
        """Keep an embedding or lm_head of the head's own that equals the target's in memory once."""
        model = target.model
        for own, theirs in (
            (self.embed_tokens, model.get_input_embeddings()),
            (self.lm_head, model.get_output_embeddings()),
        ):
            weight = getattr(theirs, "weight", None)
            if own is None or not isinstance(weight, nn.Parameter):
                continue
            if (weight.shape, weight.dtype, weight.device) == (own.weight.shape, own.weight.dtype, own.weight.device):
                own.weight = weight if torch.equal(weight, own.weight) else own.weight

    def logits(self, hidden: Tensor, target: Target) -> Tensor:
        """Logits [.., V] of hidden [.., hidden], by the head's own lm_head or else the target's.

        V counts the head's own vocabulary; `target_ids` tells which tokens these are.
        """
        if self.lm_head is None:
            return target.lm_head(hidden.to(target.dtype))
        logits: Tensor = self.lm_head(hidden.to(self.dtype))
        return logits

    def target_ids(self, ids: Tensor) -> Tensor:
        """The target's token ids of ids [..] in the head's own vocabulary."""
        return ids if self.token_ids is None else self.token_ids[ids]

    @abstractmethod
    def forward_text(self, aux_hidden_states: Tensor, token_ids: Tensor, anchors: Tensor, embed: Embed) -> Tensor:
        """Draft behind many anchors of one known text, differentiably; equal to what the head drafts in use.

        A draft depends on what lies before its anchor and on the anchor, so a state or embedding that is not finite
        spoils the drafts that may see it and no others; those are NaN.

        Args:
            aux_hidden_states: [n, aux_layers * hidden], of the first n positions, up to the last anchor at least.
            token_ids: [T], the whole text.
            anchors: [A], positions of at least 1.
            embed: the target's embedding.

        Returns:
            Hidden states [A, block_size - 1, hidden], ready for the target's lm_head: the one at (a, d - 1) predicts
            the token d places after anchor a. What is predicted from behind the text means nothing.
        """

    @torch.no_grad()
    def read_last_aux_hidden_state(self) -> None:
        """Set the weights before the layers so that these read the last of the aux hidden states as it is."""
        self.fc.weight.zero_()
        self.fc.weight[:, -self.config.hidden_size :].fill_diagonal_(1.0)

    @property
    def _scaling(self) -> float:
        return float(self.config.head_dim**-0.5)

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


def zero_not_finite(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [.., width] with zeros in place of each row that holds NaN or infinity; and which rows [..] those are.

    A weight of zero does not silence NaN, neither in attention nor in a gradient, so such rows must not enter them.
    """
    spoiled = ~rows.isfinite().all(dim=-1)
    return rows.masked_fill(spoiled.unsqueeze(-1), 0.0), spoiled


def spoiled_before(spoiled: Tensor, anchors: Tensor, reach: int | None) -> Tensor:
    """Whether a block sees a spoiled row: spoiled [n], anchors [A] -> bool [A].

    A block sees the rows before its anchor: all of them, or the last `reach`.
    """
    counts = nn.functional.pad(spoiled.cumsum(0), (1, 0))  # how many of the rows before a position
    last = anchors.clamp(max=len(spoiled))
    first = torch.zeros_like(anchors) if reach is None else (anchors - reach).clamp(min=0, max=len(spoiled))
    return counts[last] > counts[first]


def block_tokens(token_ids: Tensor, anchors: Tensor, length: int) -> Tensor:
    """The tokens [A, length] from each anchor [A] on; behind the end of token_ids [T], its last one."""
    places = anchors[:, None] + torch.arange(length, device=anchors.device)
    return token_ids[places.clamp(max=len(token_ids) - 1)]
