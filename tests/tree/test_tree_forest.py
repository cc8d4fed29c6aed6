"""Forests: built by hand, thinned out, and asked for ranks, against plain Python."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec.tree import Forest, forest_of


@st.composite
def forests(draw: st.DrawFn) -> tuple[Forest, list[list[int]]]:
    """A forest of random shape and the parents of each of its trees, ordered as `Forest` promises."""
    shapes: list[list[int]] = []
    for _ in range(draw(st.integers(1, 4))):
        parents, level = [-1], [0]
        for _ in range(draw(st.integers(0, 4))):
            below = []
            for node in level:
                for _ in range(draw(st.integers(0, 3))):
                    below.append(len(parents))
                    parents.append(node)
            level = below
        shapes.append(parents)
    trees = [(list(range(len(p))), p, [-0.5 * i for i in range(len(p))]) for p in shapes]
    return forest_of(trees), shapes


def trees_of(forest: Forest) -> list[list[tuple[tuple[int, ...], float]]]:
    """Each tree as its nodes' paths of tokens and log probabilities."""
    found = []
    for index in range(forest.num_trees):
        rows = forest.rows(index)
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(forest.tokens[rows].tolist(), forest.parents[rows].tolist(), strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        found.append(list(zip(paths, forest.log_probs[rows].tolist(), strict=True)))
    return found


@settings(max_examples=40)
@given(forests())
def test_depths_and_ranks(case: tuple[Forest, list[list[int]]]) -> None:
    forest, shapes = case
    depths, ranks = [], []
    for parents in shapes:
        for node, parent in enumerate(parents):
            depths.append(0 if parent < 0 else depths[len(depths) - node + parent] + 1)
            ranks.append(0 if parent < 0 else parents[:node].count(parent))
    assert forest.depths.tolist() == depths
    assert forest.sibling_ranks().tolist() == ranks


@settings(max_examples=40)
@given(forests(), st.randoms(use_true_random=False))
def test_keep_leaves_the_paths_of_what_is_kept(case: tuple[Forest, list[list[int]]], random) -> None:
    forest, _ = case
    parents = forest.parent_nodes().tolist()
    kept: list[bool] = []
    for node, parent in enumerate(parents):
        kept.append(parent == node or (kept[parent] and random.random() < 0.6))
    thinned = forest.keep(torch.tensor(kept))
    flags = iter(kept)
    expected = [[node for node in tree if next(flags)] for tree in trees_of(forest)]
    assert trees_of(thinned) == expected
    assert thinned.depths.tolist() == forest.depths[torch.tensor(kept)].tolist()
