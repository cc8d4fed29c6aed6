"""Prompt lookup: draft what followed the last time the same words were written. Needs no training and no model."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from jetspec.engine.drafters.base import Drafter
from jetspec.engine.sequence import Sequence
from jetspec.errors import JetSpecError
from jetspec.tree import Forest, forest_of
from jetspec.tree.trie import find_continuations, trie


class NgramDrafter(Drafter):
    """Continues the longest suffix of a text that occurs earlier in it, by every way it has gone on so far.

    The tree is the trie of the continuations, with their shares as probabilities; one continuation gives a chain.

    Args:
        max_ngram: longest suffix looked up, in tokens.
        min_ngram: shortest one.
        depth: tokens a draft reaches ahead.
        max_matches: occurrences taken into account, newest first.

    Raises:
        JetSpecError: a number is below 1, or min_ngram above max_ngram.

    Source: prompt lookup decoding (Saxena, 2023), here with all matches instead of one.
    """

    def __init__(self, *, max_ngram: int = 4, min_ngram: int = 2, depth: int = 10, max_matches: int = 16) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise JetSpecError(f"min_ngram={min_ngram}: must lie in 1 .. max_ngram={max_ngram}")
        if depth < 1 or max_matches < 1:
            raise JetSpecError(f"depth={depth} and max_matches={max_matches}: must be at least 1")
        self.max_ngram, self.min_ngram = max_ngram, min_ngram
        self.depth, self.max_matches = depth, max_matches

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> Forest:
        """The most frequent continuations, newest occurrences first."""
        trees = []
        for sequence, budget in zip(sequences, budgets, strict=True):
            tokens = np.array(sequence.token_ids)
            starts = find_continuations(tokens, self.min_ngram, self.max_ngram)[-self.max_matches :]
            depth = min(self.depth, sequence.max_depth)
            ways = [tokens[start : start + depth].tolist() for start in starts[::-1]]
            trees.append(trie(sequence.anchor, ways, budget))
        return forest_of(trees)
