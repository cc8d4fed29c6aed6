"""Trees of what a text has gone on with before: the trie of its continuations."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import numpy as np


def find_continuations(tokens: np.ndarray, min_ngram: int, max_ngram: int) -> np.ndarray:
    """The places in tokens [n] that follow an earlier occurrence of the text's end, ascending.

    The end is the longest suffix of min_ngram .. max_ngram tokens that has occurred before; without one the result is
    empty.
    """
    for n in range(min(max_ngram, len(tokens) - 1), min_ngram - 1, -1):
        windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], n)
        (found,) = np.nonzero((windows == tokens[-n:]).all(axis=1))
        if len(found):
            return found + n
    return np.empty(0, dtype=np.int64)


def trie(root: int, ways: Seq[Seq[int]], budget: int) -> tuple[list[int], list[int], list[float]]:
    """The `budget` most frequent nodes of the trie of `ways` below `root`: tokens, parents, path log probabilities.

    Nodes lie by depth, parent and frequency; equally frequent ones by first occurrence. A node's probability given
    its parent is its share of the parent's ways, one more added for a way not seen yet.
    """
    tokens, parents, log_probs = [root], [-1], [0.0]
    level: list[tuple[int, list[Seq[int]]]] = [(0, list(ways))]
    depth = 0
    while level:
        below: list[tuple[int, list[Seq[int]]]] = []
        for parent, group in level:
            branches: dict[int, list[Seq[int]]] = {}
            for way in group:
                if len(way) > depth:
                    branches.setdefault(way[depth], []).append(way)
            for token, branch in sorted(branches.items(), key=lambda item: -len(item[1])):
                below.append((len(tokens), branch))
                tokens.append(token)
                parents.append(parent)
                log_probs.append(log_probs[parent] + math.log(len(branch) / (len(group) + 1)))
        level, depth = below, depth + 1
    # A child is less probable than its parent and lies behind it, so the best nodes hold their parents.
    kept = sorted(sorted(range(len(tokens)), key=lambda node: -log_probs[node])[:budget])
    new_index = {node: index for index, node in enumerate(kept)}
    new_index[-1] = -1
    return [tokens[n] for n in kept], [new_index[parents[n]] for n in kept], [log_probs[n] for n in kept]
