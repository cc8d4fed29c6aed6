"""What the reproduction measures, against naive computations."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.reproduction.measure import Recording, acceptance, drafting_ms, faithfulness
from benchmarks.reproduction.plan import KINDS, WEIGHTINGS, Plan
from jetspec.head import DraftHead, head_for_target
from jetspec.models.target import Target
from jetspec.train.dataset import Captured
from jetspec.train.replay import Replay
from tests.helpers.tiny import tiny_llama, tiny_target

PROMPTS = [[5, 6, 7], [8, 9, 10, 11], [40, 41]]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(seed=3)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """The target's model, with transformers' own attention."""
    return tiny_llama(seed=3)


@pytest.fixture(scope="module")
def head(target: Target) -> DraftHead:
    return head_for_target(target, num_layers=1, num_aux_layers=2, seed=1, block_size=4, mask_token_id=120).eval()


@pytest.fixture(scope="module")
def answers(model: PreTrainedModel, head: DraftHead) -> list[Captured]:
    """The model's own greedy answers, by a forward over the whole text for every token."""
    found = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(12):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        aux_hidden_states = torch.cat([states[layer + 1][0, :-1] for layer in head.config.target_layer_ids], dim=-1)
        found.append(Captured(torch.tensor(ids), len(prompt), aux_hidden_states, torch.empty(0)))
    return found


def test_faithfulness_is_that_of_whole_forwards(
    target: Target, model: PreTrainedModel, head: DraftHead, answers: list[Captured]
) -> None:
    measured = faithfulness(target, head, answers, max_tokens=12)
    drafter = Recording(head)
    Replay(target, drafter, answers, max_tokens=12).run(4)
    agreed: list[list[float]] = [[], [], []]
    log_probs: list[list[float]] = [[], [], []]
    for branch in drafter.branches:
        text = answers[branch.answer].token_ids[: branch.start].tolist()
        assert branch.tokens[0] == int(answers[branch.answer].token_ids[branch.start]), "it starts with the anchor"
        for depth, token in enumerate(branch.tokens[1:]):
            logits = model(torch.tensor([text + branch.tokens[: depth + 1]])).logits[0, -1]
            agreed[depth].append(float(logits.argmax() == token))
            log_probs[depth].append(float(logits.log_softmax(-1)[token]))
    assert len(agreed[0]) > 10
    assert measured["agreement"] == pytest.approx([statistics.fmean(values) for values in agreed])
    assert measured["target"] == pytest.approx([statistics.fmean(values) for values in log_probs], abs=1e-4)
    assert all(value < 0 for value in measured["draft"])


def test_acceptance_grows_with_the_budget(target: Target, head: DraftHead, answers: list[Captured]) -> None:
    measured = acceptance(target, head, answers, (4, 100), max_tokens=12, temperature=0.0)
    assert 1 <= measured["tree"]["4"] <= measured["tree"]["100"]
    assert measured["chain"]["4"] == measured["chain"]["100"] <= measured["tree"]["100"]


def test_drafting_is_timed_for_every_budget_and_depth(target: Target, head: DraftHead, answers: list[Captured]) -> None:
    times = drafting_ms(target, head, answers[0], (1, 3), (4, 8), repeats=1)
    assert {budget: set(row) for budget, row in times.items()} == {"4": {"1", "3"}, "8": {"1", "3"}}
    assert all(ms > 0 for row in times.values() for ms in row.values())


def test_every_kind_is_trained_alike(tmp_path) -> None:
    plan = Plan("tiny", str(tmp_path), 3, 2, 8, 8, 2, 5)
    configs = [plan.config(tmp_path, name) for name in plan.jobs()]
    assert configs[0].kind == "autoregressive", "the slowest first"
    assert len({config.output for config in configs}) == len(configs) == 2 * len(KINDS) - 1 + 2
    for config in configs:
        assert (config.num_layers, config.max_steps, config.blocks_per_step, config.block_size) == (2, 5, 128, 8)


def test_another_plan_is_refused(tmp_path) -> None:
    Plan("tiny", "data", 3, 2, 8, 8, 2, 5).check_folder(tmp_path)
    Plan("tiny", "data", 3, 2, 8, 8, 2, 5).check_folder(tmp_path)
    with pytest.raises(SystemExit, match="another plan"):
        Plan("tiny", "data", 3, 2, 8, 8, 2, 6).check_folder(tmp_path)


def test_every_job_has_a_valid_configuration_of_its_kind(tmp_path: Path) -> None:
    plan = Plan("smollm2-135m", str(tmp_path), 4, 2, 16, 16, 1, 2)
    configs = {name: plan.config(tmp_path, name) for name in plan.jobs()}
    assert {name for name, config in configs.items() if config.kind == "autoregressive"} == {"autoregressive-0"}
    assert next(iter(configs)) == "autoregressive-0", "the slowest job comes first"
    assert {name.rpartition("-")[0] for name in configs} == {*KINDS, *WEIGHTINGS}
