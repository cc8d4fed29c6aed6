"""Drafters for tests: one that knows the truth, and one that is always wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import torch

from jetspec.engine import Drafter, Sequence
from jetspec.tree import Forest
from tests.helpers.trees import build_forest


class OracleDrafter(Drafter):
    """Drafts the true continuation of each prompt plus wrong branches; `hit` is how often the truth is among them.

    The true token's rank among the candidates varies, so accepted paths turn left and right through the tree.
    """

    def __init__(
        self,
        truth: dict[tuple[int, ...], list[int]],
        vocab_size: int,
        *,
        depth: int = 6,
        width: int = 3,
        hit: float = 0.8,
        seed: int = 0,
    ) -> None:
        self.truth = truth
        self.vocab_size = vocab_size
        self.depth, self.width, self.hit = depth, width, hit
        self.random = random.Random(seed)

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> Forest:
        candidates = torch.tensor([self._candidates(s) for s in sequences])
        log_probs = torch.tensor([0.5, 0.3, 0.2]).log()[: self.width].expand(candidates.shape)
        anchors = torch.tensor([s.anchor for s in sequences])
        return build_forest(anchors, log_probs, candidates, list(budgets), max_depths=[s.max_depth for s in sequences])

    def _candidates(self, sequence: Sequence) -> list[list[int]]:
        truth = self.truth[tuple(sequence.prompt_ids)]
        assert truth[: sequence.num_output] == sequence.output_ids, "the engine left the true path"
        rest = truth[sequence.num_output :]
        levels = []
        for d in range(self.depth):
            level = self.random.sample(range(self.vocab_size), self.width)
            if d < len(rest) and rest[d] not in level and self.random.random() < self.hit:
                level[self.random.randrange(self.width)] = rest[d]
            levels.append(level)
        return levels
