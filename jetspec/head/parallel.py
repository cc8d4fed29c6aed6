"""The parallel head: from the target's hidden states and a block of mask tokens to the hidden states of a draft."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from jetspec.attention.cache import KVCache
from jetspec.attention.reference import attend
from jetspec.attention.rows import slot_index
from jetspec.errors import JetSpecError
from jetspec.head.base import Attend, DraftHead, Embed, KeysValues, block_tokens, spoiled_before, zero_not_finite
from jetspec.head.config import HeadConfig
from jetspec.head.correction import new_correction
from jetspec.head.masks import block_mask, context_mask
from jetspec.head.transition import Transition

#: Of so many blocks one is trained without the transition.
LAYERS_ALONE_EVERY = 4


class ParallelHead(DraftHead):
    """n decoder layers over blocks `[anchor, MASK, ..]`: one forward drafts all depths.

    Queries come from the block; keys and values from the fused context of the committed tokens before the anchor,
    then from the block itself. The context's keys and values are computed once per committed token.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        self.transition = Transition(config) if config.transition_size else None
        self.correction = new_correction(config)

    def context(self, aux_hidden_states: Tensor) -> Tensor:
        """Aux hidden states [n, aux_layers * hidden] -> fused context [n, hidden]."""
        fused: Tensor = self.hidden_norm(self.fc(aux_hidden_states.to(self.dtype)))
        return fused

    def context_kv(self, context: Tensor, positions: Tensor) -> list[KeysValues]:
        """Fused context [n, hidden] at positions [n] -> per layer, keys and values [n, kv_heads, head_dim]."""
        rotation = self.rotary(positions, self.dtype)
        return [layer.self_attn.keys_values(context, rotation) for layer in self.layers]

    @torch.inference_mode()
    def extend(self, aux_hidden_states: Tensor, positions: Tensor, slots: Tensor, cache: KVCache) -> None:
        """Write the context of committed tokens: states [n, aux_layers * hidden], positions and slots [n]."""
        for layer, (keys, values) in enumerate(self.context_kv(self.context(aux_hidden_states), positions)):
            cache.write(layer, slots, keys, values)

    @torch.inference_mode()
    def forward_blocks(
        self, embeds: Tensor, positions: Tensor, context_slots: Sequence[Tensor], cache: KVCache
    ) -> Tensor:
        """Draft one block for each of S sequences.

        embeds [S, B, hidden] is the target's embedding of `[anchor, MASK, ..]`, positions [S, B] starts at the anchor's
        own position t, and context_slots[s] names the slots of the committed tokens before it, up to t - 1: all t of
        them, or the last ones where the head's view is bounded.
        Returns hidden states [S, B, hidden], ready for the target's lm_head. Nothing is written to the cache.
        Raises JetSpecError where the shapes do not fit together.
        """
        sequences, length, _ = embeds.shape
        if positions.shape != (sequences, length) or len(context_slots) != sequences:
            raise JetSpecError(
                f"embeds hold {sequences} blocks of {length}, but positions have shape {tuple(positions.shape)} "
                f"and there are {len(context_slots)} context_slots"
            )
        masks = {window: self._masks(positions, context_slots, window) for window in set(self.config.windows)}

        slots = [slot_index(one, cache.device) for one in context_slots]

        def attend_context(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            blocks = zip(*(torch.split(x, length) for x in (q, k, v)), strict=True)
            attended = []
            for sequence, (block_q, block_k, block_v) in enumerate(blocks):
                past_k, past_v = cache.read(layer, slots[sequence])
                mask = masks[self.config.windows[layer]][sequence]
                keys, values = torch.cat((past_k, block_k)), torch.cat((past_v, block_v))
                attended.append(attend(block_q, keys, values, mask, self._scaling))
            return torch.cat(attended)

        return self._decode_blocks(embeds, positions, attend_context)

    def forward_train(self, context: Tensor, block_embeds: Tensor, anchors: Tensor) -> Tensor:
        """Draft many blocks of one known sequence at once, differentiably; equal to `forward_blocks`.

        A block sees the context before its anchor, and itself.

        Args:
            context: [T, hidden], the fused context of the sequence.
            block_embeds: [A, B, hidden].
            anchors: [A], positions in the sequence.

        Returns:
            Hidden states [A, B, hidden].

        Raises:
            JetSpecError: there are not as many anchors as blocks.
        """
        blocks, length, _ = block_embeds.shape
        if len(anchors) != blocks:
            raise JetSpecError(f"there are {blocks} blocks, but {len(anchors)} anchors")
        positions = anchors[:, None] + torch.arange(length, device=anchors.device)
        context_positions = torch.arange(len(context), device=anchors.device)
        past = self.context_kv(context, context_positions)
        # The rows of other blocks are masked, not skipped; small groups keep that waste below the context's own size.
        group = max(1, len(context) // length)
        masks = {
            window: [
                torch.cat((context_mask(p, context_positions, window), self._own_block_mask(p, window)), dim=-1)
                for p in torch.split(positions, group)
            ]
            for window in set(self.config.windows)
        }

        def attend_context(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rows = zip(*(torch.split(x, group * length) for x in (q, k, v)), strict=True)
            attended = []
            for mask, (block_q, block_k, block_v) in zip(masks[self.config.windows[layer]], rows, strict=True):
                keys, values = torch.cat((past[layer][0], block_k)), torch.cat((past[layer][1], block_v))
                attended.append(attend(block_q, keys, values, mask.flatten(0, 1), self._scaling))
            return torch.cat(attended)

        return self._decode_blocks(block_embeds, positions, attend_context)

    def forward_text(self, aux_hidden_states: Tensor, token_ids: Tensor, anchors: Tensor, embed: Embed) -> Tensor:
        """See `DraftHead.forward_text`; with a transition some blocks are trained without it.

        Raises:
            JetSpecError: the head has a correction, which changes logits and no hidden states.
        """
        if self.correction is not None:
            raise JetSpecError(f"a {self.config.family} head cannot be trained here; use its publisher's code")
        known = block_tokens(token_ids, anchors, self.config.block_size - 1)
        block = torch.full((len(anchors), self.config.block_rows), self.mask_token_id, device=anchors.device)
        block[:, 0] = known[:, 0]
        aux_hidden_states, spoiled = zero_not_finite(aux_hidden_states)
        embeds, spoiled_embeds = zero_not_finite(embed(block).to(self.dtype))
        hidden = self.forward_train(self.context(aux_hidden_states), embeds, anchors)
        hidden = hidden if self.config.sample_from_anchor else hidden[:, 1:]
        windows = [window for window in self.config.windows if window is not None]
        reach = max(windows) - 1 if len(windows) == len(self.layers) else None
        lost = spoiled_before(spoiled, anchors, reach) | spoiled_embeds.any(dim=-1)
        hidden = hidden.masked_fill(lost[:, None, None], float("nan"))
        if self.transition is None:
            return hidden
        shift, _ = self.transition(embed(known))
        if self.training:
            # Drafting takes each depth's candidates from the layers alone, so these must stay good on their own.
            with_shift = torch.arange(len(anchors), device=anchors.device) % LAYERS_ALONE_EVERY != 0
            shift = shift * with_shift[:, None, None]
        drafts: Tensor = hidden + shift.to(hidden.dtype)
        return drafts

    @property
    def mask_token_id(self) -> int:
        """The token that fills a block behind its anchor."""
        assert self.config.mask_token_id is not None  # the configuration sees to it
        return self.config.mask_token_id

    def _decode_blocks(self, embeds: Tensor, positions: Tensor, attend_context: Attend) -> Tensor:
        """Run the layers over all block rows at once; `attend_context` is what differs between use and training."""
        x = self._decode(embeds.flatten(0, 1).to(self.dtype), positions.flatten(), attend_context)
        hidden: Tensor = self.norm(x)
        return hidden.view(embeds.shape).to(embeds.dtype)

    def _masks(self, positions: Tensor, context_slots: Sequence[Tensor], window: int | None) -> list[Tensor | None]:
        """For each sequence, bool [B, context + B], or None where every row sees everything."""
        if window is None and not self.config.causal:
            return [None] * len(context_slots)
        within = block_mask(positions, self.config.causal, window)
        before = [
            context_mask(positions[s], positions[s, 0] + torch.arange(-len(slots), 0, device=positions.device), window)
            for s, slots in enumerate(context_slots)
        ]
        return [torch.cat((context, block), dim=-1) for context, block in zip(before, within, strict=True)]

    def _own_block_mask(self, positions: Tensor, window: int | None) -> Tensor:
        """Rows of its own block that a row sees, for positions [A, B]: bool [A, B, A * B]."""
        blocks, length = positions.shape
        same = torch.eye(blocks, dtype=torch.bool, device=positions.device)[:, None, :, None]
        within = block_mask(positions, self.config.causal, window)[:, :, None, :]
        return (same & within).reshape(blocks, length, blocks * length)
