"""Acceptance is counted by the real engine: lengths, depths and answers agree with what it returns."""

from __future__ import annotations

import pytest

import jetspec.train.evaluate as evaluate_module
from jetspec import LLM, SamplingParams
from jetspec.head import DraftHead, head_for_target
from jetspec.models.target import Target
from jetspec.train import measure_acceptance
from jetspec.train.processes import Processes

PROMPTS = [[5, 6, 7], [8, 9, 10, 11], [40, 41], [3] * 6, [100, 30, 7]]


@pytest.fixture(scope="module")
def head(target: Target) -> DraftHead:
    return head_for_target(target, num_layers=1, block_size=4, num_aux_layers=2, mask_token_id=270, seed=1)


def test_lengths_and_depths_are_those_of_the_engine(target: Target, head: DraftHead) -> None:
    measured, differing = measure_acceptance(target, head, PROMPTS, tree_budgets=(1, 40, 160), max_tokens=20)
    assert [m.tree_budget for m in measured] == [1, 40, 160]
    assert differing == 0
    assert (measured[0].acceptance_length, measured[0].depths) == (1.0, [0.0, 0.0, 0.0])
    for one in measured[1:]:
        params = SamplingParams(temperature=0, max_tokens=20)
        outputs = LLM(target, head, tree_budget=one.tree_budget, num_blocks=200).generate(PROMPTS, params)
        rounds = sum(o.metrics.rounds for o in outputs)
        assert one.rounds == rounds
        assert one.acceptance_length == pytest.approx(sum(o.metrics.decoded_tokens for o in outputs) / rounds)
        assert one.acceptance_length == pytest.approx(1 + sum(one.depths))
        assert one.depths == sorted(one.depths, reverse=True)
    assert measured[2].depths[0] > 0


def test_nothing_to_measure(target: Target, head: DraftHead) -> None:
    [measured], _ = measure_acceptance(target, head, PROMPTS, max_tokens=1)
    assert (measured.rounds, measured.acceptance_length, measured.depths) == (0, 0.0, [0.0, 0.0, 0.0])
    [measured], _ = measure_acceptance(target, head, [])
    assert measured.rounds == 0


def test_prompts_are_shared_out(target: Target, head: DraftHead, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks without a prompt take part; together they count each prompt once."""
    parts: list[list[float]] = []
    monkeypatch.setattr(Processes, "sum", lambda _self, *values: parts.append(list(values)) or list(values))
    for rank in range(7):
        measure_acceptance(target, head, PROMPTS, tree_budgets=(160,), max_tokens=9, processes=Processes(rank, 7))
    measure_acceptance(target, head, PROMPTS, tree_budgets=(160,), max_tokens=9)
    assert [sum(column) for column in zip(*parts[:7], strict=True)] == parts[7]
    assert parts[6] == [0, 0, 0, 0, 0]


def test_answers_that_change_with_the_budget_are_counted(
    target: Target, head: DraftHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = evaluate_module._answer

    def faulty(*arguments):
        rounds = answer(*arguments)
        arguments[4][1].add((arguments[3],))
        return rounds

    monkeypatch.setattr(evaluate_module, "_answer", faulty)
    assert measure_acceptance(target, head, PROMPTS, tree_budgets=(1, 8), max_tokens=4)[1] == 1
