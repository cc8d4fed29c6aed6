"""Drafters: what proposes the trees that the target verifies."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import torch

from jetspec.attention import KVCache
from jetspec.engine.sequence import Sequence
from jetspec.head import DraftHead
from jetspec.packing import pack_linears
from jetspec.target import Target
from jetspec.tree import Forest, build_forest, top_candidates


class Drafter(Protocol):
    """Anything that can propose draft trees. A drafter may be wrong, never harmful: the target decides every token."""

    #: Target layers whose outputs `extend` is given; empty if it needs none.
    tap_layers: tuple[int, ...]

    def extend(self, taps: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Learn newly committed tokens of all sequences, end to end: taps `[n, num_taps * hidden]`, slots `[n]`."""

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> Forest:
        """One tree a sequence, rooted at its newest token, of at most `budgets` rows and `max_depth` levels."""


class HeadDrafter:
    """A causal parallel head: one head forward drafts for every decoding sequence.

    The head's context K/V lie in the slots that the target's block tables address.
    """

    def __init__(self, head: DraftHead, target: Target, num_blocks: int, block_size: int) -> None:
        head.config.validate_for(target)
        pack_linears(head)
        self.head = head
        self.target = target
        self.cache: KVCache = head.new_cache(num_blocks, block_size)
        self.tap_layers = head.config.target_layer_ids

    def extend(self, taps: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        self.head.extend(taps, positions, slots, self.cache)

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> Forest:
        config = self.head.config
        device = self.target.device
        anchors = torch.tensor([s.anchor for s in sequences], device=device)
        block = torch.full((len(sequences), config.block_size), config.mask_token_id, device=device)
        block[:, 0] = anchors
        starts = torch.tensor([s.num_cached for s in sequences], device=device)
        positions = starts[:, None] + torch.arange(config.block_size, device=device)
        context_slots = [s.table.slots(0, s.num_cached).to(device) for s in sequences]
        hidden = self.head.forward_blocks(self.target.embed(block), positions, context_slots, self.cache)
        logits = self.target.lm_head(hidden[:, :-1] if config.shifted else hidden[:, 1:]).float()
        temperatures = [s.params.temperature for s in sequences]
        if any(t not in (0.0, 1.0) for t in temperatures):
            # The target samples at this temperature, so its likely paths are those of the tempered head.
            scale = torch.tensor([t or 1.0 for t in temperatures], device=device)
            logits = logits / scale[:, None, None]
        log_probs, candidates = top_candidates(logits, min(max(budgets), logits.shape[-1]))
        return build_forest(anchors, log_probs, candidates, list(budgets), max_depths=[s.max_depth for s in sequences])
