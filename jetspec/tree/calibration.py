"""What a drafter's probabilities are worth: corrected by how often its nodes are really accepted."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from jetspec.tree import Forest

#: Depths and sibling ranks told apart; what lies beyond shares the last cell.
MAX_DEPTH, MAX_RANK = 32, 16
#: How much of what was seen is left after one more round: about the last 500 rounds count.
FADE = 0.998
#: Expected acceptances a cell must have seen to weigh as much as the average over all cells.
PRIOR = 2.0


class Calibration:
    """Expected and observed acceptances per kind of request, depth and sibling rank.

    A node is at stake where its parent was accepted. It adds its probability given the parent to its cell's expected
    acceptances and, if the target chose it, one to the observed ones. Their ratio corrects the drafter's probabilities;
    a cell that has seen little is drawn to the ratio over all cells.
    """

    def __init__(self, kinds: int = 1) -> None:
        self._expected = np.zeros((kinds, MAX_DEPTH, MAX_RANK))
        self._accepted = np.zeros((kinds, MAX_DEPTH, MAX_RANK))

    @property
    def ratios(self) -> np.ndarray:
        """[kinds, MAX_DEPTH, MAX_RANK]: what a probability given by the drafter is multiplied with."""
        expected, accepted = (x.sum(axis=(1, 2), keepdims=True) for x in (self._expected, self._accepted))
        overall = (accepted + 1) / (expected + 1)
        ratios: np.ndarray = (self._accepted + PRIOR * overall) / (self._expected + PRIOR)
        return ratios

    def path_probabilities(self, nodes: Nodes) -> np.ndarray:
        """[N] corrected probability that a node is reached and accepted; never above its parent's, 1 for a root."""
        corrected = np.minimum(nodes.conditional * self.ratios[nodes.cells], 1.0)
        paths: np.ndarray = np.ones_like(corrected)
        for level in nodes.levels:
            paths[level] = paths[nodes.parents[level]] * corrected[level]
        return paths

    def observe(self, nodes: Nodes, visited: np.ndarray, at_stake: np.ndarray) -> None:
        """Learn from a verified forest.

        Args:
            nodes: the forest's N nodes.
            visited: [N] bool, whether the node is on its tree's walk.
            at_stake: [N] bool, whether the target chose among the node and its siblings.
        """
        self._expected *= FADE
        self._accepted *= FADE
        cells = tuple(index[at_stake] for index in nodes.cells)
        np.add.at(self._expected, cells, nodes.conditional[at_stake])
        np.add.at(self._accepted, cells, visited[at_stake].astype(float))


class Nodes:
    """The nodes of a forest as calibration sees them. kinds [S] is the kind of each tree's request."""

    def __init__(self, forest: Forest, kinds: Seq[int]) -> None:
        depths = forest.depths.numpy()
        log_probs = forest.log_probs.double().numpy()
        self.parents = forest.parent_nodes().numpy()
        self.conditional = np.exp(log_probs - log_probs[self.parents])
        sizes = np.diff(forest.offsets)
        #: Index of each node's cell: kind, depth, rank.
        self.cells = (
            np.repeat(np.asarray(kinds, dtype=np.int64), sizes),
            np.minimum(depths, MAX_DEPTH) - 1,
            np.minimum(forest.sibling_ranks().numpy(), MAX_RANK - 1),
        )
        self.levels = [np.flatnonzero(depths == d) for d in range(1, int(depths.max(initial=0)) + 1)]

    def keep(self, kept: np.ndarray) -> Nodes:
        """Only the nodes where kept [N] is True, ranks unchanged; a kept node's parent is kept too."""
        new = object.__new__(Nodes)
        index = np.cumsum(kept) - 1
        new.parents = index[self.parents[kept]]
        new.conditional = self.conditional[kept]
        new.cells = (self.cells[0][kept], self.cells[1][kept], self.cells[2][kept])
        new.levels = [index[level[kept[level]]] for level in self.levels]
        return new
