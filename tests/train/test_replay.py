"""Replayed rounds are the engine's own, for every kind of drafter, budget and temperature."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import pytest
import torch

from jetspec import engine
from jetspec.engine import Committed, Drafter, Engine, NgramDrafter, Observer, RoundRecord, head_drafter
from jetspec.errors import JetSpecError
from jetspec.head import DraftHead, head_for_target
from jetspec.models.target import Target
from jetspec.sampling import SamplingParams
from jetspec.train.dataset import Captured
from jetspec.train.replay import Replay, acceptance_length
from jetspec.tree import Forest
from tests.helpers.tiny import tiny_target

PROMPTS = [[5, 6, 7], [40, 41], [3] * 6]
MAX_TOKENS = 20


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(seed=3, num_hidden_layers=4)


def head(target: Target, **settings) -> DraftHead:
    made = head_for_target(target, num_layers=1, target_layer_ids=(1, 2), seed=1, block_size=5, **settings)
    if getattr(made, "transition", None) is not None:
        with torch.no_grad():  # fresh ones shift nothing
            made.transition.out_proj.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(2))
    return made


def make(kind: str, target: Target) -> Drafter:
    if kind == "ngram":
        return NgramDrafter(min_ngram=1)
    if kind == "autoregressive":
        return head_drafter(head(target, kind="autoregressive"))
    settings = {"transition_size": 8} if kind == "transition" else {"causal": kind != "bidirectional"}
    return head_drafter(head(target, mask_token_id=120, **settings), chain=kind == "chain")


class Recorder(Observer):
    """What the engine commits, in full precision, and its rounds by the tokens they committed."""

    def __init__(self) -> None:
        self.aux_hidden_states: dict[str, list[torch.Tensor]] = defaultdict(list)
        self.rounds: Counter[int] = Counter()

    def committed(self, rows: Committed) -> None:
        if rows.aux_hidden_states is not None:
            self.aux_hidden_states[rows.request_id].append(rows.aux_hidden_states)

    def round(self, record: RoundRecord) -> None:
        self.rounds[len(record.new_tokens)] += 1


def run_engine(
    target: Target, drafter: Drafter, budget: int, temperature: float, stops: list[list[int]] | None = None
) -> tuple[Counter[int], list[Captured]]:
    recorder = Recorder()
    runner = Engine(target, drafter, tree_budget=budget, num_blocks=100, enable_prefix_caching=False, observer=recorder)
    sequences = []
    for i, ids in enumerate(PROMPTS):
        params = SamplingParams(
            temperature=temperature, max_tokens=MAX_TOKENS, seed=i, stop_token_ids=stops and stops[i]
        )
        sequences.append(runner.add(str(i), ids, params))
    runner.run()
    answers = []
    for i, s in enumerate(sequences):
        aux_hidden_states = (
            torch.cat(recorder.aux_hidden_states[str(i)])
            if recorder.aux_hidden_states
            else torch.empty(len(s.token_ids), 0)
        )
        answers.append(Captured(torch.tensor(s.token_ids), len(PROMPTS[i]), aux_hidden_states, torch.empty(0)))
    return recorder.rounds, answers


@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.7, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["causal", "bidirectional", "chain", "transition", "autoregressive", "ngram"])
def test_rounds_are_those_of_the_engine(target: Target, kind: str, temperature: float) -> None:
    for budget in (4, 24):
        rounds, answers = run_engine(target, make(kind, target), budget, temperature)
        replay = Replay(target, make(kind, target), answers, temperature=temperature, max_tokens=MAX_TOKENS)
        assert replay.run(budget) == rounds
        assert replay.run(budget) == rounds, "a replay starts anew"
        assert rounds.total() < sum(len(a.token_ids) for a in answers), "some drafts were accepted"


class Depths(NgramDrafter):
    """Notes how deep it may draft for each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[int]] = defaultdict(list)

    def propose(self, sequences: Sequence[engine.Sequence], budgets: Sequence[int]) -> Forest:
        for sequence in sequences:
            self.seen[sequence.request_id].append(sequence.max_depth)
        return super().propose(sequences, budgets)


def test_an_answer_that_ended_early_keeps_the_depth_it_had(target: Target) -> None:
    """The engine drafts for it as for one that may go on."""
    _, answers = run_engine(target, NgramDrafter(), 8, 0.0)
    # The last token that an answer says for the first time, but for the very last one.
    texts = [a.token_ids[a.loss_start :].tolist()[:-1] for a in answers]
    stops = [[list(dict.fromkeys(text))[-1]] for text in texts]
    real, replayed, short = Depths(), Depths(), Depths()
    _, answers = run_engine(target, real, 8, 0.0, stops)
    assert any(2 < len(a.token_ids) - a.loss_start < MAX_TOKENS for a in answers)
    Replay(target, replayed, answers, max_tokens=MAX_TOKENS).run(8)
    assert replayed.seen == real.seen
    Replay(target, short, answers).run(8)
    assert short.seen != real.seen


def test_acceptance_length_by_hand() -> None:
    assert acceptance_length(Counter({1: 2, 4: 1})) == 2.0
    assert acceptance_length(Counter()) == 0.0


def test_an_answer_without_a_round_is_refused(target: Target) -> None:
    answer = Captured(torch.tensor([1, 2, 3]), 2, torch.empty(2, 0), torch.empty(0))
    with pytest.raises(JetSpecError, match=r"answers\[0\].*two tokens"):
        Replay(target, NgramDrafter(), [answer])
