"""Draft trees as tensors: build, mask, accept."""

from jetspec.tree.accept import Walk, child_rows, walk
from jetspec.tree.build import (
    Expand,
    grow_trees,
    shared_children,
    top_candidates,
)
from jetspec.tree.forest import Forest, forest_of
from jetspec.tree.mask import ancestor_mask, chain_parents
from jetspec.tree.order import topk_lowest_id

__all__ = [
    "Expand",
    "Forest",
    "Walk",
    "ancestor_mask",
    "chain_parents",
    "child_rows",
    "forest_of",
    "grow_trees",
    "shared_children",
    "top_candidates",
    "topk_lowest_id",
    "walk",
]
