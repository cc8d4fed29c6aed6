"""Drafting with an autoregressive head: one head forward a level gives the children of that level's nodes."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from jetspec.attention import RowBatch
from jetspec.engine.drafters.base import CommittedRows, HeadDrafter
from jetspec.engine.sequence import Sequence
from jetspec.head import AutoregressiveHead
from jetspec.head.autoregressive import Paths
from jetspec.models.target import Target
from jetspec.tree import Expand


class AutoregressiveDrafter(HeadDrafter):
    """Keeps features and entries of committed tokens, and grows trees level by level.

    The slot of position t holds the feature of token t, and keys and values of the entry that ends with it, (feature
    t - 1, token t). Both depend on the tokens up to t alone, so they are right for all who share the slot.
    See `HeadDrafter` for the arguments.
    """

    head: AutoregressiveHead
    by_level = True

    def prepare(self, target: Target, num_blocks: int, block_size: int) -> None:
        """As every head, with room for one feature a token."""
        super().prepare(target, num_blocks, block_size)
        self.features = torch.empty(
            num_blocks * block_size, self.head.config.hidden_size, dtype=self.head.dtype, device=self.head.device
        )

    def extend(self, rows: CommittedRows) -> None:
        """Write the features of newly committed tokens, and the entries that end with them."""
        assert rows.aux_hidden_states is not None
        self.features.index_copy_(0, rows.slots, self.head.features(rows.aux_hidden_states))
        # The first token of a text has no feature before it, so no entry ends with it.
        spans = [(s, max(start, 1), stop) for s, start, stop in rows.spans if stop > max(start, 1)]
        if not spans:
            return
        before = torch.cat([s.table.slots(start - 1, stop - 1) for s, start, stop in spans])
        tokens = [s.token_ids[start:stop] for s, start, stop in spans]
        batch = RowBatch.chains(tokens, [s.table.slots(1, stop) for s, _, stop in spans]).to(self.target.device)
        features = self.features[before.to(self.target.device)]
        self.head.extend(features, self.head.embed(batch.token_ids, self.target), batch, self.cache, self.window)

    def children(self, anchors: Tensor, sequences: Seq[Sequence], limit: int) -> Expand:
        """A head forward for every level of the trees."""
        head, target = self.head, self.target
        roots = [s.num_cached - 1 for s in sequences]
        firsts = [self.first_seen(root) for root in roots]
        spans = list(zip(sequences, firsts, roots, strict=True))
        slots = [s.table.slots(first + 1, root + 1).to(target.device) for s, first, root in spans]
        paths = Paths(
            torch.tensor(roots, device=anchors.device).unsqueeze(1),
            [torch.arange(first, root, device=anchors.device) for _, first, root in spans],
            lambda layer, sequence: self.cache.read(layer, slots[sequence]),
        )
        last = torch.cat([s.table.slots(root, root + 1) for s, _, root in spans])
        hidden = self.features[last.to(target.device)].unsqueeze(1)

        def expand(_depth: int, tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal hidden
            features = hidden.gather(1, parents.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
            hidden = head.forward_level(features, head.embed(tokens, target), paths, parents)
            return self.candidates(self.logits(head.output(hidden), sequences), limit)

        return expand
