"""Trees over given marginals, and readings of trees that only tests need."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from jetspec.tree import Forest, grow_trees, shared_children


def build_forest(
    anchors: Tensor,
    log_probs: Tensor,
    candidates: Tensor,
    budgets: Sequence[int],
    max_depths: Sequence[int] | None = None,
) -> Forest:
    """Trees in which every node at depth d - 1 has the children candidates[:, d - 1]; log_probs alike, [S, D, K]."""
    return grow_trees(anchors, shared_children(log_probs, candidates), log_probs.shape[1], budgets, max_depths)
