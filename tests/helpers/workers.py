"""Several runs, one after the other, on the processes that torchrun started: `-m tests.helpers.workers WORK.json`.

The file holds a list of [name of a scenario below, configuration].
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch

from jetspec.models.target import Target
from jetspec.train import StepInfo, TrainConfig, train
from tests.helpers.tiny import tiny_target


class KilledError(Exception):
    pass


def whole(config: TrainConfig, target: Target) -> None:
    """No block is anybody else's as well."""

    def count(info: StepInfo) -> None:
        assert info.blocks < config.blocks_per_step + config.blocks_per_sequence

    assert train(config, target=target, watch=count).finished


def killed(config: TrainConfig, target: Target) -> None:
    """Every process dies after step 3, two steps after the last checkpoint."""

    def die(info: StepInfo) -> None:
        if info.step == 3:
            raise KilledError

    try:
        train(config, target=target, watch=die)
    except KilledError:
        assert train(config, target=target).finished


def stopped(config: TrainConfig, target: Target) -> None:
    """One process is told to end in step 2: all of them do."""

    def tell(info: StepInfo) -> None:
        if info.step == 1 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)

    result = train(config, target=target, watch=tell)
    assert (result.steps, result.finished) == (2, False)
    assert train(config, target=target).finished


if __name__ == "__main__":
    torch.set_num_threads(1)
    for scenario, settings in json.loads(Path(sys.argv[1]).read_text()):
        globals()[scenario](TrainConfig(**settings), tiny_target(text=True, seed=3))
    torch.distributed.destroy_process_group()
