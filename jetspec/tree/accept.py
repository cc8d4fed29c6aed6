"""Acceptance: follow the target's own choices through a draft tree for as long as the tree contains them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jetspec.errors import JetSpecError


@dataclass(frozen=True)
class Walk:
    """One sequence's outcome of a round."""

    rows: list[int]  # visited rows, root first: their K/V become final
    tokens: list[int]  # the target's choice at each visited row: what the round emits


def walk(
    tokens: Sequence[int],
    parents: Sequence[int],
    pick: Callable[[int], int],
    stop: Callable[[int], bool] | None = None,
    max_tokens: int | None = None,
) -> Walk:
    """Walk a tree (row 0 is the root) from its root; `pick(row)` is the target's next token after that row.

    `pick` is called once per visited row and `stop` once per chosen token, in order, so they may keep the token
    history. The walk ends at a token that no child carries (the bonus), at one for which `stop` holds, or at the
    `max_tokens`-th: nothing is picked after that.
    Raises JetSpecError for a max_tokens below 1: a walk emits at least one token.
    """
    if max_tokens is not None and max_tokens < 1:
        raise JetSpecError(f"max_tokens must be at least 1, got {max_tokens}; a finished sequence has no round to walk")
    # Of several siblings with the same token the first, most probable one counts.
    children = {(parents[row], tokens[row]): row for row in range(len(tokens) - 1, 0, -1)}
    rows: list[int] = [0]
    chosen: list[int] = []
    while True:
        token = pick(rows[-1])
        chosen.append(token)
        stopped = stop is not None and stop(token)
        child = children.get((rows[-1], token))
        if stopped or child is None or len(chosen) == max_tokens:
            return Walk(rows, chosen)
        rows.append(child)


def walk_greedy(
    tokens: Sequence[int],
    parents: Sequence[int],
    choices: Sequence[int],
    stop: Callable[[int], bool] | None = None,
    max_tokens: int | None = None,
) -> Walk:
    """`walk` where the target's choice at every row, choices [n], is already known."""
    return walk(tokens, parents, choices.__getitem__, stop, max_tokens)
