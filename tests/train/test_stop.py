"""Signals end a run in good order, once; checkpoints are kept as long as asked."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from jetspec.head import load_head
from jetspec.models.target import Target
from jetspec.train import StepInfo, TrainConfig, train
from jetspec.train.checkpoint import Progress, forget_after, save_best, save_checkpoint
from jetspec.train.signals import StopSignals

MakeConfig = Callable[..., TrainConfig]


SIZE = {"max_steps": 6, "export": "last", "eval_prompts": 2, "max_prompts": 4, "max_tokens": 8}


def test_a_signal_ends_the_step_and_leaves_a_run_to_go_on(target: Target, make_config: MakeConfig) -> None:
    train(make_config("whole", **SIZE), target=target)
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    told = {1: signal.SIGTERM, 3: signal.SIGINT}

    def tell(info: StepInfo) -> None:
        if info.step in told:
            os.kill(os.getpid(), told[info.step])

    for steps in (2, 4, 6):  # ended by one signal, resumed and ended by the other, resumed
        result = train(make_config("stopped", **SIZE), target=target, watch=tell)
        assert (result.steps, result.finished) == (steps, steps == 6)
        assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == handlers
    a, b = (load_head(make_config(name).folder).state_dict() for name in ("stopped", "whole"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_the_second_signal_does_what_it_did_before() -> None:
    before = signal.getsignal(signal.SIGTERM)
    inherited = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # ignored in what a shell runs in the background
    try:
        with StopSignals() as signals:
            assert not signals.received
            os.kill(os.getpid(), signal.SIGINT)
            assert signals.received
            assert signal.getsignal(signal.SIGTERM) == before
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, inherited)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_old_checkpoints_go_and_take_their_best_weights_along(make_config: MakeConfig) -> None:
    config = make_config(keep_checkpoints=2)
    folder = config.folder / "checkpoint"
    weights = {"fc.weight": torch.ones(2)}
    for step in (2, 4, 6, 9, 10):
        if step in (2, 4, 9):
            save_best(folder, step, weights)
        save_checkpoint(config, Progress(step=step), weights, {})
    assert names(folder) == ["best-9.safetensors", "step-10.pt", "step-9.pt"]
    save_checkpoint(config, Progress(step=12), weights, {})
    save_best(folder, 14, weights)
    save_checkpoint(config, Progress(step=14), weights, {})
    # Step 12 goes back to the best weights before it.
    assert names(folder) == ["best-14.safetensors", "best-9.safetensors", "step-12.pt", "step-14.pt"]
    forget_after(folder, 12)
    assert names(folder) == ["best-9.safetensors", "step-12.pt", "step-14.pt"]
