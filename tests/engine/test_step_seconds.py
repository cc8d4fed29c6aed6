"""Where a round's seconds go, on a clock that moves by one at every look."""

from __future__ import annotations

import time
from itertools import count

import pytest
import torch

from jetspec.clock import Clock
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
        drafter = head_for_target(target, kind=draft, num_layers=1, block_size=5, num_aux_layers=2, **mask)
    engine = Engine(target, drafter, tree_budget=8, num_blocks=16, observer=recorder)
    engine.add("x", [1, 2, 1, 2, 1], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    ticks = count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    engine.step()
    engine.step()
    monkeypatch.undo()
    return recorder.steps


@pytest.mark.parametrize("draft", ["parallel", "autoregressive", "ngram"])
def test_every_stage_has_its_own_seconds(draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, drafted = steps_of(draft, monkeypatch)
    assert (drafted.draft_s, drafted.select_s) == (1, 1)
    assert (drafted.verify_s, drafted.accept_s, drafted.commit_s) == (1, 1, 1)
    assert drafted.total_s == 6  # scheduling took one
    assert (prefill.draft_s, prefill.select_s) == (0, 1)
    assert prefill.accept_s == 2  # the first token notes its time, which is one more look
    assert prefill.total_s == 6


class FakeEvent:
    """A device event: the time at which the device, not the host, reaches it."""

    device_ms = 0.0
    synchronized = 0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        self.at = FakeEvent.device_ms

    def synchronize(self) -> None:
        FakeEvent.synchronized += 1

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at - self.at


def test_an_accelerator_is_timed_by_its_own_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round without logits waits for nothing: by the host's clock its launches alone would be learned as its cost."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(FakeEvent, "device_ms", 0.0)
    monkeypatch.setattr(FakeEvent, "synchronized", 0)
    clock = Clock(torch.device("cuda"))
    for name, reached in (("schedule", 2.0), ("verify", 52.0), ("commit", 53.0)):
        FakeEvent.device_ms = reached
        clock.lap(name)
    assert FakeEvent.synchronized == 0
    seconds = clock.seconds()
    assert FakeEvent.synchronized == 1
    assert [seconds[name] for name in ("schedule", "draft", "verify", "commit")] == pytest.approx(
        [0.002, 0.0, 0.05, 0.001]
    )
