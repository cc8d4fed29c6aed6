"""Trees with one path that grows by a level at a time."""

from __future__ import annotations


class Spine:
    """A tree with one spine: the nodes along it and their siblings."""

    def __init__(self, anchor: int) -> None:
        self.spine = [anchor]
        self.levels: list[tuple[list[float], list[int]]] = []
        self._log_prob = 0.0

    def grow(self, log_probs: list[float], ids: list[int]) -> None:
        """Add the children of the spine's end, most probable first; the first one continues the spine."""
        self.levels.append(([self._log_prob + min(p, 0.0) for p in log_probs], ids))
        self._log_prob += min(log_probs[0], 0.0)
        self.spine.append(ids[0])

    def best(self, budget: int) -> tuple[list[int], list[int], list[float]]:
        """The `budget` most probable nodes: tokens, parents, path log probabilities."""
        nodes = [(d, rank) for d, (log_probs, _) in enumerate(self.levels) for rank in range(len(log_probs))]
        # Stable: of equal nodes the shallower one stays, so a node's parent is always kept.
        kept = sorted(sorted(nodes, key=lambda n: -self.levels[n[0]][0][n[1]])[: budget - 1])
        first_of_depth = {d: index for index, (d, rank) in enumerate(kept, 1) if rank == 0}
        first_of_depth[-1] = 0
        tokens = [self.spine[0]] + [self.levels[d][1][rank] for d, rank in kept]
        parents = [-1] + [first_of_depth[d - 1] for d, _ in kept]
        return tokens, parents, [0.0] + [self.levels[d][0][rank] for d, rank in kept]
