"""Drafting with a causal parallel head: one head forward drafts a tree for every decoding sequence."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from jetspec.attention import KVCache
from jetspec.engine.drafters.base import CommittedRows, Drafter
from jetspec.engine.drafters.paths import PathChildren
from jetspec.engine.sequence import Sequence
from jetspec.errors import JetSpecError
from jetspec.head import DraftHead
from jetspec.packing import pack_linears
from jetspec.target import Target
from jetspec.tree import Forest, build_forest, grow_trees, top_candidates

#: Committed rows that wait for the next draft at most; bounds the memory of their hidden states.
MAX_PENDING_ROWS = 512


class HeadDrafter(Drafter):
    """Trees from a draft head, whose context K/V lie in the slots that the target's block tables address.

    Args:
        head: the draft head.
        chain: draft the most probable path only.
        window: committed tokens the head looks back on; None: all. Bounds the time a draft takes in long contexts.

    Raises:
        JetSpecError: window is below 1.
    """

    def __init__(self, head: DraftHead, *, chain: bool = False, window: int | None = None) -> None:
        if window is not None and window < 1:
            raise JetSpecError(f"window={window}: must be at least 1 token; use None for the whole context")
        self.head = head
        self.chain = chain
        self.window = window
        self.tap_layers = head.config.target_layer_ids
        self.cache_bytes_per_token = head.cache_bytes_per_token
        self._pending: list[CommittedRows] = []
        self._target: Target
        self._cache: KVCache

    def prepare(self, target: Target, num_blocks: int, block_size: int) -> None:
        self.head.config.validate_for(target)
        pack_linears(self.head)
        if self.head.transition is not None and target.device.type == "cpu":
            self.head.transition.float()  # recurrent layers in half types are several times slower there
        self._target = target
        self._cache = self.head.new_cache(num_blocks, block_size)

    def extend(self, rows: CommittedRows) -> None:
        # While nothing is drafted rows are collected: one large forward costs less than one a round.
        self._pending.append(rows)
        if sum(len(pending.slots) for pending in self._pending) >= MAX_PENDING_ROWS:
            self._extend_context()

    def _extend_context(self) -> None:
        if not self._pending:
            return
        taps = torch.cat([rows.taps for rows in self._pending if rows.taps is not None])
        positions = torch.cat([rows.positions for rows in self._pending])
        slots = torch.cat([rows.slots for rows in self._pending])
        self._pending.clear()
        newest = last_of_each(slots)
        self.head.extend(taps[newest], positions[newest], slots[newest], self._cache)

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> Forest:
        self._extend_context()
        config, target = self.head.config, self._target
        anchors = torch.tensor([s.anchor for s in sequences], device=target.device)
        block = torch.full((len(sequences), config.block_size), config.mask_token_id, device=target.device)
        block[:, 0] = anchors
        starts = torch.tensor([s.num_cached for s in sequences], device=target.device)
        positions = starts[:, None] + torch.arange(config.block_size, device=target.device)
        slots = [s.table.slots(self._first_seen(s), s.num_cached).to(target.device) for s in sequences]
        hidden = self.head.forward_blocks(target.embed(block), positions, slots, self._cache)
        hidden = hidden[:, :-1] if config.shifted else hidden[:, 1:]
        logits = tempered(target.lm_head(hidden).float(), sequences)
        limits = [s.max_depth for s in sequences]
        if self.head.transition is not None:
            scale = 1 / temperatures(sequences).to(target.device)
            children = PathChildren(self.head.transition, target, logits, scale, 1 if self.chain else None)
            return grow_trees(anchors, children, logits.shape[1], list(budgets), limits)
        log_probs, candidates = top_candidates(logits, 1 if self.chain else max(budgets))
        return build_forest(anchors, log_probs, candidates, list(budgets), limits)

    def _first_seen(self, sequence: Sequence) -> int:
        return 0 if self.window is None else max(0, sequence.num_cached - self.window)


def last_of_each(values: torch.Tensor) -> torch.Tensor:
    """Indices of the last occurrence of every distinct one of values [n] int64, in ascending order."""
    order = values.argsort(stable=True)
    ordered = values[order]
    is_last = torch.ones_like(ordered, dtype=torch.bool)
    is_last[:-1] = ordered[1:] != ordered[:-1]
    return order[is_last].sort().values


def tempered(logits: torch.Tensor, sequences: Seq[Sequence]) -> torch.Tensor:
    """Logits [S, .., V] at the temperature each sequence is sampled at; the likely paths are those of the target's
    tempered distribution."""
    scale = temperatures(sequences)
    if bool((scale == 1).all()):
        return logits
    return logits / scale.to(logits.device).view(-1, *[1] * (logits.dim() - 1))


def temperatures(sequences: Seq[Sequence]) -> torch.Tensor:
    """[S]: what a draft's logits are divided by. Greedy ones keep theirs: their distribution has but one token."""
    return torch.tensor([1.0 if s.params.greedy else s.params.temperature for s in sequences])
