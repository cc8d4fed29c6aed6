"""Acceptance: follow known tokens through a draft tree for as long as the tree contains them."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Walk:
    """One sequence's outcome of a round."""

    rows: list[int]  # visited rows, root first: their K/V become final
    tokens: list[int]  # the target's choice at each visited row: what the round emits


def child_rows(tokens: Sequence[int], parents: Sequence[int]) -> dict[tuple[int, int], int]:
    """The row of each child by (parent, token); row 0 is the root.

    Of several siblings with the same token the first, most probable one counts.
    """
    return {(parents[row], tokens[row]): row for row in range(len(tokens) - 1, 0, -1)}


def walk(tokens: Sequence[int], parents: Sequence[int], continuation: Sequence[int]) -> Walk:
    """Walk a tree along a known continuation of its root, of at least one token.

    The walk ends at a token that no child carries (the bonus) or at the continuation's last token.
    """
    children = child_rows(tokens, parents)
    rows = [0]
    for count, token in enumerate(continuation, 1):
        child = children.get((rows[-1], token))
        if child is None or count == len(continuation):
            return Walk(rows, list(continuation[:count]))
        rows.append(child)
    raise ValueError("a continuation holds at least one token")
