"""Measurements of a trained head: acceptance on known answers, faithfulness of its best branch, drafting time."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from jetspec.attention import RowBatch
from jetspec.engine import Drafter, Sequence, head_drafter
from jetspec.engine.drafters import CommittedRows
from jetspec.head import DraftHead
from jetspec.models.target import Target
from jetspec.train.dataset import Captured
from jetspec.train.replay import Replay, acceptance_length
from jetspec.tree import Forest


def acceptance(
    target: Target, head: DraftHead, answers: Seq[Captured], budgets: Seq[int], max_tokens: int, temperature: float
) -> dict[str, dict[str, float]]:
    """Acceptance length of the head's trees at each budget, and of its chain at the smallest budget that holds it."""
    settings = {"temperature": temperature, "max_tokens": max_tokens}
    trees = Replay(target, head_drafter(head), answers, **settings)
    lengths = {str(budget): acceptance_length(trees.run(budget)) for budget in budgets}
    chains = Replay(target, head_drafter(head, chain=True), answers, **settings)
    chain = acceptance_length(chains.run(head.config.block_size))
    return {"tree": lengths, "chain": {str(budget): chain for budget in budgets}}


@dataclass
class Branch:
    """A drafted path: the anchor at position `start` and the tokens after it."""

    answer: int
    start: int
    tokens: list[int]
    log_probs: list[float]  # of each drafted token given those before, by the head


class Recording(Drafter):
    """A chain drafter that records its proposals."""

    def __init__(self, head: DraftHead) -> None:
        self.inner = head_drafter(head, chain=True)
        self.target_layer_ids = self.inner.target_layer_ids
        self.cache_bytes_per_token = self.inner.cache_bytes_per_token
        self.branches: list[Branch] = []

    def prepare(self, target: Target, num_blocks: int, block_size: int) -> None:
        self.inner.prepare(target, num_blocks, block_size)

    def extend(self, rows: CommittedRows) -> None:
        self.inner.extend(rows)

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> Forest:
        forest = self.inner.propose(sequences, budgets)
        for tree, sequence in enumerate(sequences):
            rows = forest.rows(tree)
            paths = forest.log_probs[rows]
            self.branches.append(
                Branch(
                    int(sequence.request_id), sequence.num_cached, forest.tokens[rows].tolist(), paths.diff().tolist()
                )
            )
        return forest


@torch.inference_mode()
def faithfulness(target: Target, head: DraftHead, answers: Seq[Captured], max_tokens: int) -> dict[str, list[float]]:
    """How far the most probable branch follows the target's own factorization, by depth 1, 2, ...

    `agreement`: share of the branches whose token at that depth is the target's choice given the branch so far, right
    or wrong. `target` and `draft`: mean log probability of that token by the target and by the head.
    """
    drafter = Recording(head)
    Replay(target, drafter, answers, max_tokens=max_tokens).run(head.config.block_size)
    by_answer: dict[int, list[Branch]] = defaultdict(list)
    for branch in drafter.branches:
        by_answer[branch.answer].append(branch)
    agreed: dict[int, list[float]] = defaultdict(list)
    target_log_probs: dict[int, list[float]] = defaultdict(list)
    draft_log_probs: dict[int, list[float]] = defaultdict(list)
    for index, branches in by_answer.items():
        for branch, logits in zip(branches, _score(target, answers[index].token_ids, branches), strict=True):
            drafted = torch.tensor(branch.tokens[1:])
            scores = logits[:-1].float().log_softmax(-1)
            given = scores.gather(1, drafted[:, None])[:, 0]
            for depth, (same, own, head_own) in enumerate(
                zip((scores.argmax(-1) == drafted).tolist(), given.tolist(), branch.log_probs, strict=True), 1
            ):
                agreed[depth].append(float(same))
                target_log_probs[depth].append(own)
                draft_log_probs[depth].append(head_own)
    columns = {"agreement": agreed, "target": target_log_probs, "draft": draft_log_probs}
    return {name: [statistics.fmean(values[d]) for d in sorted(values)] for name, values in columns.items()}


def _score(target: Target, text: torch.Tensor, branches: Seq[Branch]) -> list[torch.Tensor]:
    """The target's logits at every token of each branch."""
    length, rows = len(text), [len(branch.tokens) for branch in branches]
    cache = target.new_cache(length + sum(rows), 1)
    target.forward(RowBatch.chains([text], [torch.arange(length)]), cache, torch.empty(0, dtype=torch.int64))
    ends = [length + sum(rows[: i + 1]) for i in range(len(rows))]
    slots = [
        torch.cat([torch.arange(branch.start), torch.arange(end - count, end)])
        for branch, end, count in zip(branches, ends, rows, strict=True)
    ]
    logits = target.forward(RowBatch.chains([branch.tokens for branch in branches], slots), cache).logits
    return list(logits.split(rows))


@torch.inference_mode()
def drafting_ms(
    target: Target, head: DraftHead, answer: Captured, depths: Seq[int], budgets: Seq[int], repeats: int = 5
) -> dict[str, dict[str, float]]:
    """Median milliseconds of drafting one tree for one sequence: by budget, then by depth."""
    replay = Replay(target, head_drafter(head), [answer])
    replay.run(8)
    [sequence] = replay.sequences
    times: dict[str, dict[str, list[float]]] = {str(b): {str(d): [] for d in depths} for b in budgets}
    for _ in range(repeats + 1):
        for budget in budgets:
            for depth in depths:
                sequence.max_new_tokens = sequence.num_output + 1 + depth
                start = time.perf_counter()
                replay.drafter.propose([sequence], [budget])
                times[str(budget)][str(depth)].append(1e3 * (time.perf_counter() - start))
    return {b: {d: statistics.median(t[1:]) for d, t in row.items()} for b, row in times.items()}
