"""How many rows each tree gets: a fixed number, or what promises the most tokens per second."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import pairwise

import numpy as np
import torch

from jetspec.engine.batch import Allocation, Round, ScheduledSequence, Selection
from jetspec.engine.sequence import Sequence
from jetspec.models.cost import CostModel
from jetspec.tree import Forest
from jetspec.tree.calibration import Calibration, Nodes

#: Rows of a tree while nothing is known, least and most rows a tree is drafted with.
FIRST_ROWS, LEAST_ROWS, MOST_ROWS = 16, 8, 256
#: Weight of the newest draft in the average gain of a node.
GAIN_RATE = 0.15
#: Drafting that does not pay is tried again after this many rounds, then after twice as many, up to the last; at once
#: where the trial went well.
FIRST_PAUSE, LAST_PAUSE = 16, 128
#: Nodes of a trial: enough to learn from.
TRIAL_NODES = 4


class Budget(ABC):
    """Decides the size of trees: before drafting how large they may get, after it which nodes are verified.

    What one round's calls must tell each other travels in the round's `Allocation` and `Selection`; a budget keeps what
    it has learned from earlier rounds, and nothing else.
    """

    @abstractmethod
    def allocate(self, sequences: list[Sequence]) -> Allocation:
        """Rows that the tree of each of these decoding sequences may have at most; 1: no draft for it."""

    def select(self, allocation: Allocation, forest: Forest) -> Selection:
        """The part of a draft for the allocation's sequences that is verified; all of it by default."""
        del allocation
        return Selection(forest)

    def observe(self, current: Round) -> None:  # noqa: B027 - a budget need not learn
        """Learn from a round that is over: its times, and what the target accepted of its trees."""


class FixedBudget(Budget):
    """Every tree may have the same number of rows."""

    def __init__(self, tree_budget: int) -> None:
        self.tree_budget = tree_budget

    def allocate(self, sequences: list[Sequence]) -> Allocation:
        """The same number of rows for every sequence."""
        return Allocation(sequences, [self.tree_budget] * len(sequences))


class AutoBudget(Budget):
    """Over the whole batch, the nodes that maximize expected tokens per second; none where plain decoding is faster.

    A node's gain is its corrected path probability, its cost what the cost model says of one more row. Before a draft
    the mean gains of earlier drafts tell whether it will pay; if not, one sequence drafts now and then, to see whether
    it would again.
    """

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self.calibration = Calibration(kinds=2)
        # Mean probability of a tree's k-th best node, and the weight behind each mean.
        self._gains = np.zeros(MOST_ROWS - 1)
        self._weights = np.zeros(MOST_ROWS - 1)
        self._rows = FIRST_ROWS
        self._pause = FIRST_PAUSE
        self._waited = 0
        self._trials = 0

    def allocate(self, sequences: list[Sequence]) -> Allocation:
        """Twice what the average draft was worth; a trial now and then where drafting did not pay."""
        number = len(sequences)
        if number == 0 or not self._weights.any():
            return Allocation(sequences, [self._rows] * number)
        best = self._best_nodes(number, sum(s.num_cached for s in sequences) / number)
        if best > 0:
            self._pause, self._waited = FIRST_PAUSE, 0
            # Twice what the average draft is worth: a confident one may be worth more.
            self._rows = int(np.clip(2 ** np.ceil(np.log2(2 * best + 1)), LEAST_ROWS, MOST_ROWS))
            return Allocation(sequences, [self._rows] * number)
        self._waited += 1
        if self._waited < self._pause:
            return Allocation(sequences, [1] * number)
        self._pause, self._waited = min(2 * self._pause, LAST_PAUSE), 0
        chosen = self._trials % number
        self._trials += 1
        return Allocation(sequences, [LEAST_ROWS if i == chosen else 1 for i in range(number)], is_trial=True)

    def _best_nodes(self, number: int, context: float) -> int:
        """The number of nodes for each of `number` sequences that promises most tokens per second.

        Drafts count as much as they did on average. 0 means plain decoding.
        """
        gains = self.mean_gains()
        nodes = np.arange(len(gains) + 1)
        tokens = 1 + np.concatenate([[0.0], np.cumsum(gains)])
        rows = number * (1 + nodes)
        seconds = self.cost.verify_seconds(rows, rows * context)
        seconds[1:] += self.cost.draft_seconds(number)
        return int(np.argmax(tokens / seconds))

    def mean_gains(self) -> np.ndarray:
        """[k] mean probability of a tree's k-th best node, for as many nodes as have been drafted."""
        known = int(self._weights.astype(bool).sum())
        return np.asarray(self._gains[:known] / self._weights[:known])

    def select(self, allocation: Allocation, forest: Forest) -> Selection:
        """The nodes of all trees, most probable first, for as long as expected tokens per second rise."""
        nodes = Nodes(forest, [_kind(s) for s in allocation.sequences])
        paths = self.calibration.path_probabilities(nodes)
        is_root = forest.parents.numpy() < 0
        candidates = np.flatnonzero(~is_root)
        # Stable, so that a node as probable as its parent comes after it.
        order = candidates[np.argsort(-paths[candidates], kind="stable")]
        number = len(allocation.sequences)
        context = sum(s.num_cached for s in allocation.sequences)
        added = np.arange(len(order) + 1)
        tokens = number + allocation.other_tokens + np.concatenate([[0.0], np.cumsum(paths[order])])
        rows = number + allocation.other_rows + added
        keys = context + allocation.other_keys + added * (context / number)
        seconds = self.cost.verify_seconds(rows, keys) + self.cost.draft_seconds(number)
        best = int(np.argmax(tokens / seconds))
        if allocation.is_trial:
            best = max(best, min(TRIAL_NODES, len(order)))
        kept = is_root.copy()
        kept[order[:best]] = True
        return Selection(
            forest.keep(torch.from_numpy(kept)),
            nodes.keep(kept),
            proposed=[np.sort(paths[a + 1 : b])[::-1] for a, b in pairwise(forest.offsets)],
            reached_limit=[
                int(forest.depths[a:b].max()) >= s.max_depth
                for s, (a, b) in zip(allocation.sequences, pairwise(forest.offsets), strict=True)
            ],
            expected_tokens=float(tokens[best]),
            expected_seconds=float(seconds[best]),
        )

    def observe(self, current: Round) -> None:
        """Learn the round's cost, what drafts are worth, and how often their nodes are accepted."""
        drafted, draft_s = current.drafted, current.seconds["draft"]
        self.cost.observe_verify(current.rows, current.keys, current.total_s - draft_s)
        if not drafted or current.selection is None:
            return
        self.cost.observe_draft(len(drafted), draft_s)
        self._learn_gains(current.allocation, current.selection)
        walks = [s.walk for s in drafted]
        if current.allocation.is_trial and any(walk is not None and len(walk.rows) > 1 for walk in walks):
            self._waited = self._pause
        # A request that failed on the way says nothing about its draft.
        if None not in walks:
            self._calibrate(current.selection, drafted)

    def _learn_gains(self, allocation: Allocation, selection: Selection) -> None:
        """Mean probability of the k-th best node, over what was granted.

        A tree that ends where its request must says nothing of the nodes that would have come deeper.
        """
        rate = 1 - (1 - GAIN_RATE) ** (1 / len(allocation.sequences))
        trees = zip(allocation.rows, selection.proposed, selection.reached_limit, strict=True)
        for rows, proposed, reached_limit in trees:
            granted = len(proposed) if reached_limit else min(rows - 1, len(self._gains))
            gains = np.zeros(granted)  # nodes that were granted and not drafted gain nothing
            gains[: len(proposed)] = proposed[:granted]
            self._gains[:granted] += rate * (gains - self._gains[:granted])
            self._weights[:granted] += rate * (1 - self._weights[:granted])

    def _calibrate(self, selection: Selection, drafted: list[ScheduledSequence]) -> None:
        assert selection.nodes is not None
        visited = np.zeros(len(selection.forest.tokens), dtype=bool)
        chosen_among = visited.copy()
        for start, scheduled in zip(selection.forest.offsets[:-1], drafted, strict=True):
            assert scheduled.walk is not None
            rows = np.asarray(scheduled.walk.rows) + start
            visited[rows] = True
            # What a request that ended would have accepted at its last row is not known.
            chosen_among[rows[:-1] if scheduled.sequence.finished else rows] = True
        at_stake = chosen_among[selection.nodes.parents] & (selection.forest.parents.numpy() >= 0)
        self.calibration.observe(selection.nodes, visited, at_stake)


def _kind(sequence: Sequence) -> int:
    """Greedy and sampled requests accept differently: the argmax is the likely token more often than a draw is."""
    return 0 if sequence.params.greedy else 1
