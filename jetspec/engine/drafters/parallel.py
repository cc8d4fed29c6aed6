"""Drafting with a parallel head: one head forward gives the children of all depths."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from jetspec.engine.drafters.base import CommittedRows, HeadDrafter, temperatures
from jetspec.engine.sequence import Sequence
from jetspec.head import ParallelHead
from jetspec.head.correction import CorrectedChildren, DominoCorrection
from jetspec.head.transition import TransitionChildren
from jetspec.models.target import Target
from jetspec.tree import Expand, shared_children

#: Committed rows that wait for the next draft at most; bounds the memory of their hidden states.
MAX_PENDING_ROWS = 512


class ParallelDrafter(HeadDrafter):
    """Keeps the fused context of committed tokens and drafts a block of mask tokens behind it.

    See `HeadDrafter` for the arguments.
    """

    head: ParallelHead

    def prepare(self, target: Target, num_blocks: int, block_size: int) -> None:
        """As every head, with recurrent layers in float32 on a CPU, where these layers are slow in half types."""
        super().prepare(target, num_blocks, block_size)
        if target.device.type == "cpu":
            if self.head.transition is not None:
                self.head.transition.float()
            if isinstance(self.head.correction, DominoCorrection):
                self.head.correction.prefix_gru.float()
        self._pending: list[CommittedRows] = []

    def extend(self, rows: CommittedRows) -> None:
        """Collect rows while nothing is drafted: one large forward costs less than one a round."""
        self._pending.append(rows)
        if sum(len(pending.slots) for pending in self._pending) >= MAX_PENDING_ROWS:
            self.write_pending()

    def write_pending(self) -> None:
        """Write the context of the collected rows."""
        if not self._pending:
            return
        states = torch.cat([rows.aux_hidden_states for rows in self._pending if rows.aux_hidden_states is not None])
        positions = torch.cat([rows.positions for rows in self._pending])
        slots = torch.cat([rows.slots for rows in self._pending])
        self._pending.clear()
        newest = last_of_each(slots)
        self.head.extend(states[newest], positions[newest], slots[newest], self.cache)

    def children(self, anchors: Tensor, sequences: Seq[Sequence], limit: int) -> Expand:
        """One list of candidates a depth, or with a transition a list for every node."""
        self.write_pending()
        config, target = self.head.config, self.target
        block = torch.full((len(sequences), config.block_rows), self.head.mask_token_id, device=target.device)
        block[:, 0] = anchors
        starts = torch.tensor([s.num_cached for s in sequences], device=target.device)
        positions = starts[:, None] + torch.arange(config.block_rows, device=target.device)
        slots = [s.table.slots(self.first_seen(s.num_cached), s.num_cached).to(target.device) for s in sequences]
        hidden = self.head.forward_blocks(self.head.embed(block, target), positions, slots, self.cache)
        if not config.sample_from_anchor:
            hidden = hidden[:, :-1] if config.shifted else hidden[:, 1:]
        logits = self.logits(hidden, sequences)
        scale = 1 / temperatures(sequences).to(target.device)
        if self.head.transition is not None:
            return TransitionChildren(self.head.transition, target, logits, scale, limit)
        if self.head.correction is not None:
            return CorrectedChildren(self.head.correction, self.head, target, hidden, logits, scale, limit)
        return shared_children(*self.candidates(logits, limit))


def last_of_each(values: Tensor) -> Tensor:
    """Indices of the last occurrence of every distinct one of values [n] int64, in ascending order."""
    order = values.argsort(stable=True)
    ordered = values[order]
    is_last = torch.ones_like(ordered, dtype=torch.bool)
    is_last[:-1] = ordered[1:] != ordered[:-1]
    return order[is_last].sort().values
