"""How many rows each tree gets: a fixed number, or what promises the most tokens per second."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from jetspec.engine.calibration import Calibration, Nodes
from jetspec.engine.cost import CostModel
from jetspec.engine.sequence import Sequence
from jetspec.tree import Forest, Walk

#: Rows of a tree while nothing is known, least and most rows a tree is drafted with.
FIRST_ROWS, LEAST_ROWS, MOST_ROWS = 16, 8, 256
#: Weight of the newest draft in the average gain of a node.
GAIN_RATE = 0.15
#: Drafting that does not pay is tried again after this many rounds, then after twice as many, up to the last; at once
#: where the trial went well.
FIRST_PAUSE, LAST_PAUSE = 16, 128
#: Nodes of a trial: enough to learn from.
TRIAL_NODES = 4


@dataclass(frozen=True)
class Load:
    """What a round runs whatever is drafted.

    rows: one a decoding sequence, and the prompt chunks'. keys: row-key pairs they attend to. tokens: how many they
    yield. context: mean committed tokens of the decoding sequences.
    """

    rows: int
    keys: int
    tokens: int
    context: float


@dataclass(frozen=True)
class Plan:
    """The trees a round verifies, and what is expected of the round (None where the budget does not ask)."""

    forest: Forest
    nodes: Nodes | None = None
    expected_tokens: float | None = None
    expected_seconds: float | None = None


class Budget(ABC):
    """Decides the size of trees: before drafting how large they may get, after it which nodes are verified."""

    @abstractmethod
    def rows(self, sequences: Seq[Sequence]) -> list[int]:
        """Rows that each decoding sequence's tree may have at most; 1: no draft for it."""

    def plan(self, forest: Forest, sequences: Seq[Sequence], load: Load) -> Plan:
        """The part of a draft for `sequences` that is verified."""
        return Plan(forest)

    def observe_plan(self, plan: Plan, sequences: Seq[Sequence], walks: Seq[Walk]) -> None:
        """What the target accepted of a plan's trees."""
        return

    def observe_times(self, rows: int, keys: int, drafted: int, draft_s: float, verify_s: float) -> None:
        """Seconds of a round: the draft's for `drafted` sequences, and all the rest."""
        return


class FixedBudget(Budget):
    """Every tree may have the same number of rows."""

    def __init__(self, tree_budget: int) -> None:
        self.tree_budget = tree_budget

    def rows(self, sequences: Seq[Sequence]) -> list[int]:
        return [self.tree_budget] * len(sequences)


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
        self._trial = False

    def rows(self, sequences: Seq[Sequence]) -> list[int]:
        number = len(sequences)
        self._trial = False
        if number == 0:
            return []
        if not self._weights.any():
            return [self._rows] * number
        best = self._best_nodes(number, sum(s.num_cached for s in sequences) / number)
        if best > 0:
            self._pause, self._waited = FIRST_PAUSE, 0
            # Twice what the average draft is worth: a confident one may be worth more.
            self._rows = int(np.clip(2 ** np.ceil(np.log2(2 * best + 1)), LEAST_ROWS, MOST_ROWS))
            return [self._rows] * number
        self._waited += 1
        if self._waited < self._pause:
            return [1] * number
        self._pause, self._waited, self._trial = min(2 * self._pause, LAST_PAUSE), 0, True
        chosen = self._pause.bit_length() % number
        return [LEAST_ROWS if i == chosen else 1 for i in range(number)]

    def _best_nodes(self, number: int, context: float) -> int:
        """Nodes for each of `number` sequences that pay best if drafts are worth what they were on average; 0: plain
        decoding."""
        known = int(self._weights.astype(bool).sum())
        nodes = np.arange(known + 1)
        tokens = 1 + np.concatenate([[0.0], np.cumsum(np.divide(self._gains[:known], self._weights[:known]))])
        rows = number * (1 + nodes)
        seconds = self.cost.verify_seconds(rows, rows * context)
        seconds[1:] += self.cost.draft_seconds(number)
        return int(np.argmax(tokens / seconds))

    def plan(self, forest: Forest, sequences: Seq[Sequence], load: Load) -> Plan:
        nodes = Nodes(forest, [_kind(s) for s in sequences])
        paths = self.calibration.path_probabilities(nodes)
        self._learn_gains(forest, paths)
        is_root = forest.parents.numpy() < 0
        candidates = np.flatnonzero(~is_root)
        # Stable, so that a node as probable as its parent comes after it.
        order = candidates[np.argsort(-paths[candidates], kind="stable")]
        tokens = load.tokens + np.concatenate([[0.0], np.cumsum(paths[order])])
        added = np.arange(len(order) + 1)
        seconds = self.cost.verify_seconds(load.rows + added, load.keys + added * load.context)
        seconds += self.cost.draft_seconds(forest.num_trees)
        best = int(np.argmax(tokens / seconds))
        if self._trial:
            best = max(best, min(TRIAL_NODES, len(order)))
        kept = is_root.copy()
        kept[order[:best]] = True
        return Plan(forest.keep(torch.from_numpy(kept)), nodes.keep(kept), float(tokens[best]), float(seconds[best]))

    def _learn_gains(self, forest: Forest, paths: np.ndarray) -> None:
        asked = (LEAST_ROWS if self._trial else self._rows) - 1
        rate = 1 - (1 - GAIN_RATE) ** (1 / forest.num_trees)
        for start, stop in zip(forest.offsets[:-1], forest.offsets[1:], strict=True):
            gains = np.zeros(asked)  # nodes that were asked for and not drafted gain nothing
            best = np.sort(paths[start + 1 : stop])[::-1][:asked]
            gains[: len(best)] = best
            self._gains[:asked] += rate * (gains - self._gains[:asked])
            self._weights[:asked] += rate * (1 - self._weights[:asked])

    def observe_plan(self, plan: Plan, sequences: Seq[Sequence], walks: Seq[Walk]) -> None:
        assert plan.nodes is not None
        visited = np.zeros(len(plan.forest.tokens), dtype=bool)
        chosen_among = visited.copy()
        for start, sequence, walk in zip(plan.forest.offsets[:-1], sequences, walks, strict=True):
            rows = np.asarray(walk.rows) + start
            visited[rows] = True
            # What a request that ended would have accepted at its last row is not known.
            chosen_among[rows[:-1] if sequence.finished else rows] = True
        if self._trial and any(len(walk.rows) > 1 for walk in walks):
            self._waited = self._pause
        at_stake = chosen_among[plan.nodes.parents] & (plan.forest.parents.numpy() >= 0)
        self.calibration.observe(plan.nodes, visited, at_stake)

    def observe_times(self, rows: int, keys: int, drafted: int, draft_s: float, verify_s: float) -> None:
        self.cost.observe_verify(rows, keys, verify_s)
        if drafted:
            self.cost.observe_draft(drafted, draft_s)


def _kind(sequence: Sequence) -> int:
    """Greedy and sampled requests accept differently: the argmax is the likely token more often than a draw is."""
    return 0 if sequence.params.greedy else 1
