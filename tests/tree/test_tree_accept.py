"""The walk along a known continuation emits it for as far as the tree holds it, and one token more."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec.tree import Walk, walk

#        0
#      /   \
#     1     2
#    / \     \
#   3   4     5
TOKENS = [9, 10, 11, 12, 13, 12]
PARENTS = [-1, 0, 0, 1, 1, 2]


@settings(max_examples=100)
@given(st.data())
def test_the_rows_are_the_longest_prefix_that_the_tree_holds(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 20))
    parents = [-1] + [data.draw(st.integers(0, row - 1)) for row in range(1, n)]
    token = st.integers(0, 2)
    tokens = data.draw(st.lists(token, min_size=n, max_size=n))  # siblings may share a token: the first one counts
    continuation = data.draw(st.lists(token, min_size=1, max_size=6))
    rows = [0]
    for next_token in continuation[:-1]:
        carriers = [row for row in range(1, n) if parents[row] == rows[-1] and tokens[row] == next_token]
        if not carriers:
            break
        rows.append(carriers[0])
    assert walk(tokens, parents, continuation) == Walk(rows, continuation[: len(rows)])


def test_full_acceptance_ends_with_a_bonus() -> None:
    assert walk(TOKENS, PARENTS, [10, 13, 77, 5]) == Walk([0, 1, 4], [10, 13, 77])


def test_nothing_accepted_still_emits_one_token() -> None:
    assert walk(TOKENS, PARENTS, [99, 10]) == Walk([0], [99])


def test_a_token_of_another_branch_does_not_count() -> None:
    assert walk(TOKENS, PARENTS, [11, 13, 1]) == Walk([0, 2], [11, 13])


def test_of_equal_siblings_the_first_counts() -> None:
    assert walk([9, 4, 4, 5], [-1, 0, 0, 1], [4, 5, 6]) == Walk([0, 1, 3], [4, 5, 6])


@pytest.mark.parametrize(("length", "rows"), [(1, [0]), (2, [0, 1])])
def test_the_last_known_token_is_emitted_without_its_row(length: int, rows: list[int]) -> None:
    """A draft that carries past the end of the answer is cut there."""
    continuation = [10, 12][:length]
    assert walk(TOKENS, PARENTS, continuation) == Walk(rows, continuation)


def test_an_empty_continuation_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        walk(TOKENS, PARENTS, [])
