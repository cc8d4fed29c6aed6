"""Acceptance emits the target's own tokens along the tree, and never one too many."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jetspec.attention.blocks import BlockManager, BlockTable
from jetspec.engine.accept import accept
from jetspec.engine.batch import ScheduledSequence
from jetspec.engine.sequence import Sequence
from jetspec.sampling import SamplingParams
from jetspec.tree import Walk

VOCAB_SIZE = 100
EOS = 90
#        0
#      /   \
#     1     2
#    / \     \
#   3   4     5
TOKENS = [9, 10, 11, 12, 13, 12]
PARENTS = [-1, 0, 0, 1, 1, 2]


def accepted(
    tokens: list[int], parents: list[int], choices: list[int], *, known: int = 0, before: int = 0, **params: Any
) -> ScheduledSequence:
    """The tree after acceptance, behind `known` known rows of its own and `before` rows of other sequences."""
    params = {"temperature": 0, "max_tokens": 50, **params}
    sequence = Sequence(
        "a",
        [1, tokens[0]],
        SamplingParams(**params),
        seed=0,
        eos_token_ids=frozenset({EOS}),
        max_new_tokens=params["max_tokens"],
        table=BlockTable(BlockManager(4, 4)),
    )
    scheduled = ScheduledSequence(sequence, len(tokens), 1, decodes=not known)
    scheduled.token_ids = [7] * known + tokens
    scheduled.parents = list(range(-1, known)) if known else parents
    scheduled.num_known, scheduled.logits_start = known, before
    every = [3] * before + choices
    accept(scheduled, torch.nn.functional.one_hot(torch.tensor(every), VOCAB_SIZE).float(), every)
    return scheduled


def reference(
    tokens: list[int], parents: list[int], choices: list[int], stops: set[int], limit: int
) -> tuple[list[int], list[int]]:
    """Emit plainly, token by token; then count how far the emitted path lies in the tree."""
    emitted: list[int] = []
    rows: list[int] = []
    row: int | None = 0
    while row is not None:
        rows.append(row)
        emitted.append(choices[row])
        row = next((r for r in range(1, len(tokens)) if parents[r] == row and tokens[r] == emitted[-1]), None)
    for count in range(1, len(emitted) + 1):
        if count == limit or emitted[count - 1] in stops:
            return rows[:count], emitted[:count]
    return rows, emitted


@settings(max_examples=100)
@given(st.data())
def test_against_emitting_plainly(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 20))
    parents = [-1] + [data.draw(st.integers(0, row - 1)) for row in range(1, n)]
    token = st.integers(0, 2)
    tokens = data.draw(st.lists(token, min_size=n, max_size=n))  # siblings may share a token
    choices = data.draw(st.lists(token, min_size=n, max_size=n))
    stops = data.draw(st.sets(token, max_size=1))
    limit = data.draw(st.integers(1, 8))
    before = data.draw(st.integers(0, 2))
    known = data.draw(st.integers(0, 2)) if n == 1 else 0  # the last chunk of a prompt has a lone root
    got = accepted(tokens, parents, choices, known=known, before=before, max_tokens=limit, stop_token_ids=sorted(stops))
    rows, emitted = reference(tokens, parents, choices, stops, limit)
    assert got.walk == Walk(rows, emitted)
    assert got.sequence.output_ids == emitted
    assert got.sequence.finish_reason == (
        "stop" if emitted[-1] in stops else "length" if len(emitted) == limit else None
    )
    assert got.kept_rows == [*range(known), *(known + row for row in rows)]


def test_eos_inside_an_accepted_path_ends_the_request() -> None:
    """The draft holds a continuation after eos; neither it nor the target is asked about it."""
    asked: list[int] = []

    def remember(ids: Tensor, scores: Tensor) -> Tensor:
        asked.append(ids.shape[1])
        return scores

    tokens = [9, EOS, 11, 12, 13, 12]
    got = accepted(tokens, PARENTS, [EOS, 12, 0, 55, 0, 0], logits_processors=[remember])
    assert got.walk == Walk([0], [EOS])
    assert (got.sequence.finish_reason, got.sequence.stop_reason) == ("stop", None)
    assert asked == [2]
    on = accepted(tokens, PARENTS, [EOS, 12, 0, 55, 0, 0], ignore_eos=True)
    assert on.walk == Walk([0, 1, 3], [EOS, 12, 55])


@pytest.mark.parametrize(
    ("choices", "walk"),
    [
        ([10, 13, 0, 0, 77, 0], Walk([0, 1, 4], [10, 13, 77])),
        ([99, 0, 0, 0, 0, 0], Walk([0], [99])),
        ([11, 0, 13, 0, 0, 0], Walk([0, 2], [11, 13])),
    ],
    ids=["a path and a bonus", "nothing", "a token of another branch does not count"],
)
def test_walks(choices: list[int], walk: Walk) -> None:
    assert accepted(TOKENS, PARENTS, choices).walk == walk


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("fails_at", [2, 3])
def test_a_token_that_cannot_be_chosen_fails_the_request(temperature: int, fails_at: int) -> None:
    """What was emitted before it stays, and no row of the tree is kept."""

    def explode(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] == fails_at:
            raise RuntimeError("boom")
        return scores * 1000

    got = accepted(
        TOKENS, PARENTS, [10, 13, 0, 0, 77, 0], temperature=temperature, seed=1, logits_processors=[explode], logprobs=0
    )
    assert got.walk is None
    assert got.kept_rows == []
    assert got.sequence.finish_reason == "error"
    assert got.sequence.output_ids == [10, 13][: fails_at - 2]
    assert len(got.sequence.logprobs) == fails_at - 2


@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_not_finite_fail_the_request(temperature: int) -> None:
    got = accepted(TOKENS, PARENTS, [99, 0, 0, 0, 0, 0], temperature=temperature, logit_bias={99: 1e4})
    accept(got, torch.full((6, VOCAB_SIZE), float("nan")), [-1] * 6)
    assert (got.sequence.output_ids, got.sequence.finish_reason) == ([99], "error")
    assert "not finite" in str(got.sequence.error)
