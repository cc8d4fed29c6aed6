"""Where a round's seconds go, on a clock that moves by one at every look."""

from __future__ import annotations

import time
from itertools import count

import pytest

from jetspec.engine import Engine, EngineStep, NgramDrafter, Observer
from jetspec.head import head_for_target
from jetspec.sampling import SamplingParams
from tests.helpers.tiny import VOCAB_SIZE, tiny_target


class Recorder(Observer):
    def __init__(self) -> None:
        self.steps: list[EngineStep] = []

    def step(self, record: EngineStep) -> None:
        self.steps.append(record)


def steps_of(draft: str, monkeypatch: pytest.MonkeyPatch) -> list[EngineStep]:
    target, recorder = tiny_target("llama"), Recorder()
    drafter = NgramDrafter()
    if draft != "ngram":
        mask = {"mask_token_id": VOCAB_SIZE - 1} if draft == "parallel" else {}
        drafter = head_for_target(target, method=draft, num_layers=1, block_size=5, num_aux_layers=2, **mask)
    engine = Engine(target, drafter, tree_budget=8, num_blocks=16, observer=recorder)
    engine.add("x", [1, 2, 1, 2, 1], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    ticks = count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    engine.step()
    engine.step()
    monkeypatch.undo()
    return recorder.steps


@pytest.mark.parametrize(("kind", "n"), [("parallel", 4), ("autoregressive", 2)])
def test_growing_trees_is_told_from_the_head(kind: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, drafted = steps_of(kind, monkeypatch)
    # Growing looks at its start and end and around each of n expansions: 2 n + 1 ticks, n of them the head's. Two more
    # pass before and behind it. Cutting the trees to the budget takes one.
    assert (drafted.draft_s, drafted.select_s) == (2 + n, (n + 1) + 1)
    assert (drafted.verify_s, drafted.accept_s, drafted.commit_s) == (1, 1, 1)
    assert drafted.total_s == 2 * n + 8  # scheduling took one
    assert (prefill.draft_s, prefill.select_s) == (0, 0)


def test_other_drafters_are_not_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    _, drafted = steps_of("ngram", monkeypatch)
    assert (drafted.drafted, drafted.draft_s, drafted.select_s) == (1, 1, 1)
