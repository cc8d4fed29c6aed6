"""The walk emits the target's own tokens and never one too many."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec.errors import JetSpecError
from jetspec.tree import Walk, walk, walk_greedy

#        0
#      /   \
#     1     2
#    / \     \
#   3   4     5
TOKENS = [9, 10, 11, 12, 13, 12]
PARENTS = [-1, 0, 0, 1, 1, 2]


def reference(tokens, parents, choices, stops, max_tokens):
    """Emit plainly, token by token; then count how far the emitted path lies in the tree."""
    emitted, row, rows = [], 0, []
    while row is not None:
        rows.append(row)
        emitted.append(choices[row])
        row = next((r for r in range(len(tokens)) if parents[r] == row and tokens[r] == emitted[-1]), None)
    for count in range(1, len(emitted) + 1):
        if count == max_tokens or emitted[count - 1] in stops:
            return rows[:count], emitted[:count]
    return rows, emitted


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_walk_against_reference(data):
    n = data.draw(st.integers(1, 20))
    parents = [-1] + [data.draw(st.integers(0, row - 1)) for row in range(1, n)]
    token = st.integers(0, 2)
    tokens = data.draw(st.lists(token, min_size=n, max_size=n))  # siblings may share a token
    choices = data.draw(st.lists(token, min_size=n, max_size=n))
    stops = data.draw(st.sets(token, max_size=1))
    max_tokens = data.draw(st.none() | st.integers(1, 5))
    expected = reference(tokens, parents, choices, stops, max_tokens)
    result = walk_greedy(tokens, parents, choices, stops.__contains__, max_tokens)
    assert (result.rows, result.tokens) == expected


def test_full_acceptance_ends_with_a_bonus():
    assert walk_greedy(TOKENS, PARENTS, [10, 13, 0, 0, 77, 0]) == Walk([0, 1, 4], [10, 13, 77])


def test_nothing_accepted_still_emits_one_token():
    assert walk_greedy(TOKENS, PARENTS, [99, 0, 0, 0, 0, 0]) == Walk([0], [99])


def test_a_token_of_another_branch_does_not_count():
    assert walk_greedy(TOKENS, PARENTS, [11, 0, 13, 0, 0, 0]) == Walk([0, 2], [11, 13])


def test_eos_inside_an_accepted_path_ends_the_walk():
    """Fault 6: the draft holds a continuation after eos; neither it nor the target is asked about it."""
    asked = []

    def pick(row):
        asked.append(row)
        return {0: 10, 1: 12, 3: 55}[row]

    assert walk(TOKENS, PARENTS, pick, stop=lambda token: token == 10) == Walk([0], [10])
    assert asked == [0]


def test_max_tokens_ends_the_walk():
    """Fault 7: a draft that would carry past the limit is cut at it."""
    choices = [10, 12, 0, 55, 0, 0]
    assert walk_greedy(TOKENS, PARENTS, choices, max_tokens=2) == Walk([0, 1], [10, 12])
    assert walk_greedy(TOKENS, PARENTS, choices, max_tokens=3) == Walk([0, 1, 3], [10, 12, 55])


def test_no_room_for_a_token_is_refused():
    with pytest.raises(JetSpecError, match="max_tokens must be at least 1"):
        walk_greedy(TOKENS, PARENTS, TOKENS, max_tokens=0)


@pytest.mark.parametrize("limit", [None, 2, 3])
def test_stop_hears_every_chosen_token_once(limit):
    """The engine appends tokens in `stop`: also the bonus, and the last one `max_tokens` allows."""
    heard: list[int] = []

    def stop(token):
        heard.append(token)
        return False

    result = walk_greedy(TOKENS, PARENTS, [10, 13, 0, 0, 77, 0], stop, limit)
    assert heard == result.tokens
