"""Figures against arithmetic by hand."""

from __future__ import annotations

import pytest

from jetspec.bench.metrics import Figures, figures, speedup, speedup_interval
from jetspec.bench.records import Answer, Cell, Failure, Group, Header, Run
from tests.helpers.bench_records import cell

PLAIN, TREE = cell("plain"), cell("jetspec", 64)


def group(cell: Cell, index: int, tokens: int, seconds: float, ids: tuple[int, ...] = (1, 2), **values) -> Group:
    token_ids = [*ids, *[0] * (tokens + 1 - len(ids))]  # the first token comes with the prompt
    correct = values.pop("correct", None)
    answers = [Answer(question=str(index), turn=0, token_ids=token_ids, finish_reason="stop", correct=correct)]
    return Group(
        cell=cell, index=index, answers=answers, prefill_s=0.5, decode_s=seconds, tokens=tokens, **values
    )


def of(*groups: Group) -> dict[Cell, Figures]:
    run = Run(Header(config={}, machine={}), list(groups), [Failure(cell=cell("hf"), error="no group of it")])
    return {entry.cell: entry for entry in figures(run)}


def test_rates_and_speedup() -> None:
    found = of(
        group(PLAIN, 0, 10, 2.0),
        group(PLAIN, 1, 30, 3.0),
        group(TREE, 0, 10, 1.0),
        group(TREE, 1, 30, 1.0),
        group(TREE, 2, 50, 0.5),  # the baseline has not answered it
    )
    assert list(found) == [PLAIN, TREE]
    assert found[PLAIN].tokens_per_s == 8.0  # (10 + 30) / (2 + 3)
    assert found[TREE].tokens_per_s == 36.0  # (10 + 30 + 50) / (1 + 1 + 0.5)
    assert found[TREE].speedup == 2.5  # (10 + 30) / (1 + 1) over 40 / 5: the third group has no pair
    assert (found[TREE].groups, found[TREE].tokens, found[TREE].prefill_s) == (3, 90, 1.5)
    assert (found[PLAIN].speedup, found[PLAIN].speedup_interval) == (1.0, None)


def test_acceptance_depths_and_rows() -> None:
    found = of(
        group(TREE, 0, 12, 1.0, rounds={"1": 3, "3": 3}, rows=40),  # 3 * 1 + 3 * 3 = 12 tokens
        group(TREE, 1, 6, 1.0, rounds={"2": 1, "4": 1}, rows=16),  # 2 + 4 = 6
    )[TREE]
    assert found.acceptance_length == 18 / 8  # tokens over forwards: 3 + 3 + 1 + 1
    assert found.rows == 7.0  # (40 + 16) / 8
    # More than 1, 2 and 3 tokens came of 5, 4 and 1 of 8 forwards.
    assert found.depths == [5 / 8, 4 / 8, 1 / 8]
    assert found.speedup is None
    assert found.speedup_interval is None


def test_split_is_a_share_of_all_parts() -> None:
    found = of(
        group(TREE, 0, 1, 1.0, split_s={"draft": 1.0, "verify": 2.0}),
        group(TREE, 1, 1, 1.0, split_s={"verify": 4.0, "other": 1.0}),
    )[TREE]
    assert found.split == {"draft": 1 / 8, "verify": 6 / 8, "other": 1 / 8}


def test_identical_counts_answers_that_both_gave() -> None:
    found = of(
        group(PLAIN, 0, 1, 1.0, (1, 2)),
        group(PLAIN, 1, 1, 1.0, (3,)),
        group(TREE, 0, 1, 1.0, (1, 2)),
        group(TREE, 1, 1, 1.0, (3, 4)),
        group(TREE, 2, 1, 1.0, (5,)),
    )
    assert (found[TREE].identical, found[TREE].compared) == (1, 2)
    assert (found[PLAIN].identical, found[PLAIN].compared) == (None, 0)


@pytest.mark.parametrize(("temperature", "compared"), [(0.0, 1), (1.0, 0)])
def test_transformers_draws_other_samples(temperature: float, compared: int) -> None:
    plain, other = (cell(name, temperature=temperature) for name in ("plain", "hf"))
    found = of(group(plain, 0, 1, 1.0), group(other, 0, 1, 1.0))
    assert found[other].compared == compared


def test_cells_are_compared_with_the_baseline_of_their_own_setting() -> None:
    hot = cell("jetspec", 64, temperature=1.0)
    found = of(group(PLAIN, 0, 10, 1.0), group(hot, 0, 10, 1.0))
    assert (found[hot].speedup, found[hot].compared) == (None, 0)


def test_accuracy_is_of_those_that_can_be_told() -> None:
    found = of(
        group(TREE, 0, 1, 1.0, correct=True),
        group(TREE, 1, 1, 1.0, correct=False),
        group(TREE, 2, 1, 1.0, correct=False),
        group(TREE, 3, 1, 1.0, correct=None),
    )[TREE]
    assert (found.accuracy, found.scored) == (1 / 3, 3)
    assert of(group(TREE, 0, 1, 1.0))[TREE].accuracy is None


def test_peak_is_the_largest() -> None:
    groups = [group(TREE, i, 1, 1.0, peak_bytes=peak) for i, peak in enumerate((5, None, 7))]
    assert of(*groups)[TREE].peak_bytes == 7


def test_nothing_decoded_has_no_rate() -> None:
    found = of(group(PLAIN, 0, 0, 0.0), group(TREE, 0, 0, 0.0))[TREE]
    assert (found.tokens_per_s, found.speedup, found.acceptance_length, found.depths) == (None, None, None, [])
    found = of(group(PLAIN, 0, 0, 0.0), group(PLAIN, 1, 0, 0.0), group(TREE, 0, 5, 1.0), group(TREE, 1, 5, 1.0))[TREE]
    assert (found.tokens_per_s, found.speedup, found.speedup_interval) == (5.0, None, None)
    assert (found.split, found.rows) == ({}, None)


def pairs(*rates: tuple[int, float, int, float]) -> list[tuple[Group, Group]]:
    return [(group(TREE, i, t, s), group(PLAIN, i, bt, bs)) for i, (t, s, bt, bs) in enumerate(rates)]


def test_equal_pairs_have_an_interval_without_width() -> None:
    equal = pairs(*[(10, 1.0, 10, 2.0)] * 5)
    assert speedup(equal) == 2.0
    assert speedup_interval(equal) == (2.0, 2.0)


def test_interval_holds_the_estimate_and_lies_within_the_extremes() -> None:
    mixed = pairs(*[(10, 1.0 + 0.2 * i, 10, 2.0) for i in range(8)])  # 2.0, 2.0 / 1.2, ... 2.0 / 2.4
    low, high = speedup_interval(mixed)
    assert 2.0 / 2.4 < low < speedup(mixed) < high < 2.0
    assert speedup_interval(mixed) == (low, high)  # seeded
    assert speedup_interval(mixed, seed=1) != (low, high)


def test_interval_of_two_pairs_is_known() -> None:
    """Of two pairs, a quarter of the resamples holds the first twice, a quarter the second: both tails."""
    assert speedup_interval(pairs((10, 1.0, 10, 1.0), (10, 1.0, 10, 3.0))) == (1.0, 3.0)
