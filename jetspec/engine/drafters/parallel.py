"""What a parallel head keeps of committed tokens, and the children it gives to draft nodes."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from jetspec.engine.drafters.base import CommittedRows
from jetspec.engine.drafters.paths import PathChildren
from jetspec.engine.drafters.temperature import temperatures, tempered
from jetspec.engine.sequence import Sequence
from jetspec.head import ParallelHead
from jetspec.models.target import Target
from jetspec.tree import Expand, shared_children, top_candidates

#: Committed rows that wait for the next draft at most; bounds the memory of their hidden states.
MAX_PENDING_ROWS = 512


class ParallelContext:
    """The fused context of committed tokens; one head forward gives the children of all depths."""

    by_level = False

    def __init__(
        self, head: ParallelHead, target: Target, num_blocks: int, block_size: int, window: int | None
    ) -> None:
        self.head, self.target, self.window = head, target, window
        self.cache = head.new_cache(num_blocks, block_size)
        if head.transition is not None and target.device.type == "cpu":
            head.transition.float()  # recurrent layers in half types are several times slower there
        self._pending: list[CommittedRows] = []

    def extend(self, rows: CommittedRows) -> None:
        # While nothing is drafted rows are collected: one large forward costs less than one a round.
        self._pending.append(rows)
        if sum(len(pending.slots) for pending in self._pending) >= MAX_PENDING_ROWS:
            self.write_pending()

    def write_pending(self) -> None:
        if not self._pending:
            return
        aux_hidden_states = torch.cat(
            [rows.aux_hidden_states for rows in self._pending if rows.aux_hidden_states is not None]
        )
        positions = torch.cat([rows.positions for rows in self._pending])
        slots = torch.cat([rows.slots for rows in self._pending])
        self._pending.clear()
        newest = last_of_each(slots)
        self.head.extend(aux_hidden_states[newest], positions[newest], slots[newest], self.cache)

    def children(self, anchors: torch.Tensor, sequences: Seq[Sequence], limit: int) -> Expand:
        self.write_pending()
        config, target = self.head.config, self.target
        block = torch.full((len(sequences), config.block_size), self.head.mask_token_id, device=target.device)
        block[:, 0] = anchors
        starts = torch.tensor([s.num_cached for s in sequences], device=target.device)
        positions = starts[:, None] + torch.arange(config.block_size, device=target.device)
        slots = [s.table.slots(self._first_seen(s), s.num_cached).to(target.device) for s in sequences]
        hidden = self.head.forward_blocks(target.embed(block), positions, slots, self.cache)
        hidden = hidden[:, :-1] if config.shifted else hidden[:, 1:]
        logits = tempered(target.lm_head(hidden).float(), sequences)
        if self.head.transition is not None:
            scale = 1 / temperatures(sequences).to(target.device)
            return PathChildren(self.head.transition, target, logits, scale, limit)
        return shared_children(*top_candidates(logits, limit))

    def _first_seen(self, sequence: Sequence) -> int:
        return 0 if self.window is None else max(0, sequence.num_cached - self.window)


def last_of_each(values: torch.Tensor) -> torch.Tensor:
    """Indices of the last occurrence of every distinct one of values [n] int64, in ascending order."""
    order = values.argsort(stable=True)
    ordered = values[order]
    is_last = torch.ones_like(ordered, dtype=torch.bool)
    is_last[:-1] = ordered[1:] != ordered[:-1]
    return order[is_last].sort().values
