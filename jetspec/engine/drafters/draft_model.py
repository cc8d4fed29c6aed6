"""Drafting with a small language model that shares the target's vocabulary."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import torch

from jetspec.attention import KVCache, RowBatch
from jetspec.engine.drafters.base import CommittedRows, Drafter, tempered
from jetspec.engine.sequence import Sequence
from jetspec.errors import JetSpecError
from jetspec.models.onednn_linear import pack_linears
from jetspec.models.target import Target
from jetspec.tree import Forest, forest_of, top_candidates
from jetspec.tree.spine import Spine


class ModelDrafter(Drafter):
    """The small model's most probable path, one forward a token, with the runners-up at every step as its branches.

    Its K/V lie in the slots that the target's block tables address.

    Args:
        model: the small model, loaded like a target.
        depth: tokens a draft reaches ahead: forwards of the small model a round.

    Raises:
        JetSpecError: depth is below 1, or the model has recurrent layers.

    Source: speculative decoding (Leviathan et al., 2023), with branches.
    """

    def __init__(self, model: Target, *, depth: int = 4) -> None:
        if depth < 1:
            raise JetSpecError(f"depth={depth}: must be at least 1")
        if model.state_bytes:
            # Its drafts would have to be taken back from the states.
            raise JetSpecError(
                f"draft model {model.name} has recurrent layers; use a model with attention in every layer, or a head"
            )
        self.model = model
        self.depth = depth
        self.cache_bytes_per_token = model.cache_bytes_per_token
        self._cache: KVCache
        self._vocab_size: int

    def prepare(self, target: Target, num_blocks: int, block_size: int) -> None:
        """Check that both models share a vocabulary, and make room for the small one's K/V."""
        super().prepare(target, num_blocks, block_size)
        check_vocabularies(self.model, target)
        # Either may have padded its vocabulary.
        self._vocab_size = min(self.model.vocab_size, target.num_embeddings)
        pack_linears(self.model.model)
        self._cache = self.model.new_cache(num_blocks, block_size)

    def extend(self, rows: CommittedRows) -> None:
        """Run the small model over newly committed tokens."""
        # A model of a shorter context than the target's drafts within its own.
        spans = [(s, start, min(stop, self.model.max_context)) for s, start, stop in rows.spans]
        spans = [span for span in spans if span[1] < span[2]]
        if spans:
            self._forward(spans, torch.empty(0, dtype=torch.int64))

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> Forest:
        """The small model's greedy path and the runners-up at each of its steps."""
        paths = [Spine(s.anchor) for s in sequences]
        room = [
            min(self.depth, budget - 1, s.max_depth, self.model.max_context - s.num_cached)
            for s, budget in zip(sequences, budgets, strict=True)
        ]
        for step in range(max(room, default=0)):
            growing = [i for i, depth in enumerate(room) if depth > step]
            if not growing:
                break
            spans = [
                (sequences[i], sequences[i].num_cached + step, sequences[i].num_cached + step + 1) for i in growing
            ]
            logits = self._forward(spans, torch.arange(len(spans)), [paths[i].spine[-1:] for i in growing])
            logits = tempered(logits[:, : self._vocab_size].float(), [sequences[i] for i in growing])
            log_probs, ids = top_candidates(logits, min(max(budgets), logits.shape[-1]))
            for i, row_log_probs, row_ids in zip(growing, log_probs.tolist(), ids.tolist(), strict=True):
                if math.isfinite(row_log_probs[0]):
                    paths[i].grow(row_log_probs, row_ids)
                else:
                    room[i] = 0
                    self.warn_not_finite(f"draft model {self.model.name}")
        return forest_of([path.best(budget) for path, budget in zip(paths, budgets, strict=True)])

    def _forward(
        self, spans: list[tuple[Sequence, int, int]], logits_rows: torch.Tensor, tokens: Seq[Seq[int]] | None = None
    ) -> torch.Tensor:
        """Run the model over positions `start .. stop - 1` of each span, by default with the sequence's own tokens."""
        if tokens is None:
            tokens = [sequence.token_ids[start:stop] for sequence, start, stop in spans]
        batch = RowBatch.chains(tokens, [sequence.table.slots(0, stop) for sequence, _, stop in spans])
        return self.model.forward(batch, self._cache, logits_rows).logits


def check_vocabularies(model: Target, target: Target) -> None:
    """Raise JetSpecError unless a token id means the same to both models."""
    if model.device != target.device:
        raise JetSpecError(f"draft model is on {model.device}, the target on {target.device}: load both on one device")
    if model.num_embeddings < target.vocab_size and model.tokenizer is None:
        raise JetSpecError(
            f"draft model {model.name} knows {model.num_embeddings} tokens, the target {target.vocab_size}: "
            "use a model with the target's vocabulary"
        )
    if model.tokenizer is None or target.tokenizer is None:
        return
    ours, theirs = model.tokenizer.get_vocab(), target.tokenizer.get_vocab()
    differing = next((token for token, index in theirs.items() if ours.get(token) != index), None)
    if differing is not None:
        raise JetSpecError(
            f"draft model {model.name} and target {target.name} have different vocabularies "
            f"({differing!r} is {ours.get(differing)} and {theirs[differing]}): use a model with the target's tokenizer"
        )
