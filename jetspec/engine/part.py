"""The rows one sequence has in a round, and the batch that the rows of all of them make."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from jetspec.attention import RowBatch, Segment
from jetspec.engine.scheduler import Grant
from jetspec.engine.sequence import Sequence
from jetspec.sampling import top_logprobs
from jetspec.tree import Forest


@dataclass
class Part:
    """One sequence's rows in a round: `known` tokens as a chain, then a tree whose root follows them.

    A prompt chunk that is not the last has no tree; the last one has a root alone; a decoding sequence has no `known`
    rows but the tree, its root being the newest token. `row_*` describe all rows; parents are indices within the part.
    """

    sequence: Sequence
    known: list[int]
    tokens: list[int]
    parents: list[int]
    log_probs: list[float]
    row_tokens: list[int]
    row_parents: list[int]
    row_positions: list[int]
    #: Whether the rows decode: a verify forward, or one plain step.
    is_round: bool

    @classmethod
    def chain(cls, grant: Grant) -> Part:
        """Known tokens as rows: a prompt chunk, or the lone root of plain decoding."""
        sequence = grant.sequence
        rows = 1 if sequence.is_decoding else grant.rows
        start = sequence.num_cached
        tokens = sequence.token_ids[start : start + rows]
        has_root = start + rows == len(sequence.token_ids)
        return cls(
            sequence,
            known=tokens[:-1] if has_root else tokens,
            tokens=tokens[-1:] if has_root else [],
            parents=[-1] if has_root else [],
            log_probs=[0.0] if has_root else [],
            row_tokens=tokens,
            row_parents=list(range(-1, rows - 1)),
            row_positions=list(range(start, start + rows)),
            is_round=sequence.is_decoding,
        )

    @classmethod
    def tree(cls, sequence: Sequence, forest: Forest, index: int) -> Part:
        """Tree `index` of a forest."""
        rows = forest.rows(index)
        tokens, parents = forest.tokens[rows].tolist(), forest.parents[rows].tolist()
        positions = (forest.depths[rows] + sequence.num_cached).tolist()
        log_probs = forest.log_probs[rows].tolist()
        return cls(sequence, [], tokens, parents, log_probs, tokens, parents, positions, is_round=True)

    def __len__(self) -> int:
        return len(self.row_tokens)

    @property
    def scores_prompt(self) -> bool:
        """Whether the rows before the root need logits."""
        sequence = self.sequence
        return sequence.params.prompt_logprobs is not None and sequence.num_cached < len(sequence.prompt_ids)

    @property
    def keys(self) -> int:
        """Row-key pairs with the committed tokens."""
        return len(self) * self.sequence.num_cached

    def score_prompt(self, logits: torch.Tensor, root: int) -> None:
        """Record the log probabilities of the prompt tokens that follow the rows; the root's logits lie at `root`."""
        sequence = self.sequence
        first = sequence.num_cached + 1
        scored = sequence.prompt_ids[first : first + len(self)]
        # After a preemption rows are scored again; what is known stays.
        new = scored[len(sequence.prompt_logprobs) - first :]
        if new:
            offset = root - len(self.known) + len(scored) - len(new)
            assert sequence.params.prompt_logprobs is not None
            rows = logits[offset : offset + len(new)]
            sequence.prompt_logprobs += top_logprobs(rows, new, sequence.params.prompt_logprobs)


def batch_of(parts: Seq[Part]) -> RowBatch:
    """All rows, end to end, on the CPU."""
    segments: list[Segment] = []
    row = 0
    for part in parts:
        cached = part.sequence.num_cached
        segments.append(Segment(row, row + len(part), cached, part.sequence.table.slots(0, cached + len(part))))
        row += len(part)
    return RowBatch(
        token_ids=torch.tensor([t for p in parts for t in p.row_tokens]),
        positions=torch.tensor([i for p in parts for i in p.row_positions]),
        parents=torch.tensor([i for p in parts for i in p.row_parents]),
        segments=segments,
    )
