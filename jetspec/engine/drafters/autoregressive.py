"""What an autoregressive head keeps of committed tokens, and the children it gives to draft nodes."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from jetspec.attention import RowBatch
from jetspec.engine.drafters.base import CommittedRows
from jetspec.engine.drafters.temperature import tempered
from jetspec.engine.sequence import Sequence
from jetspec.head import AutoregressiveHead
from jetspec.head.autoregressive import Paths
from jetspec.models.target import Target
from jetspec.tree import Expand, top_candidates


class AutoregressiveContext:
    """Features and entries of committed tokens; a head forward a level gives the children of that level's nodes.

    The slot of position t holds the feature of token t, and keys and values of the entry that ends with it, (feature
    t - 1, token t). Both depend on the tokens up to t alone, so they are right for all who share the slot.
    """

    by_level = True

    def __init__(
        self, head: AutoregressiveHead, target: Target, num_blocks: int, block_size: int, window: int | None
    ) -> None:
        self.head, self.target, self.window = head, target, window
        self.cache = head.new_cache(num_blocks, block_size)
        self.features = torch.empty(
            num_blocks * block_size, head.config.hidden_size, dtype=head.dtype, device=head.device
        )

    def extend(self, rows: CommittedRows) -> None:
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
        self.head.extend(features, self.target.embed(batch.token_ids), batch, self.cache, self.window)

    def children(self, anchors: Tensor, sequences: Seq[Sequence], limit: int) -> Expand:
        head, target = self.head, self.target
        roots = [s.num_cached - 1 for s in sequences]
        firsts = [0 if self.window is None else max(0, root - self.window) for root in roots]
        spans = list(zip(sequences, firsts, roots, strict=True))
        slots = [s.table.slots(first + 1, root + 1).to(target.device) for s, first, root in spans]
        paths = Paths(
            torch.tensor(roots, device=target.device).unsqueeze(1),
            [torch.arange(first, root, device=target.device) for _, first, root in spans],
            lambda layer, sequence: self.cache.read(layer, slots[sequence]),
        )
        last = torch.cat([s.table.slots(root, root + 1) for s, _, root in spans])
        hidden = self.features[last.to(target.device)].unsqueeze(1)

        def expand(_depth: int, tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal hidden
            features = hidden.gather(1, parents.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
            hidden = head.forward_level(features, target.embed(tokens), paths, parents)
            logits = target.lm_head(head.norm(hidden).to(target.dtype))
            return top_candidates(tempered(logits.float(), sequences), limit)

        return expand
