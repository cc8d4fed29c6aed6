"""A tiny text target, a prompts file and a quick training configuration."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jetspec.models.target import Target
from jetspec.train import TrainConfig, train
from tests.helpers.tiny import tiny_target
from tests.helpers.training import SETTINGS, Trained


@pytest.fixture(scope="session")
def target() -> Target:
    return tiny_target(text=True, seed=3)


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 short questions."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(10, 99, (200, 2), generator=generator).tolist()
    path.write_text(
        "".join(json.dumps({"question": f"add {a} to {b} #{i}"}) + "\n" for i, (a, b) in enumerate(numbers))
    )
    return path


@pytest.fixture
def make_config(prompts_file: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """Configurations of a small run into a directory under ``tmp_path``."""

    def make(name: str = "out", **changes: Any) -> TrainConfig:
        return TrainConfig(**{**SETTINGS, "prompts": prompts_file, "output": tmp_path / name, **changes})

    return make


@pytest.fixture(scope="session")
def trained(target: Target, prompts_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run over all 200 prompts, long enough for the head to learn."""
    size = {"max_prompts": None, "eval_prompts": 4, "max_tokens": 24, "shard_sequences": 64}
    step = {"max_steps": 60, "eval_every": 60, "blocks_per_step": 64, "transition_size": None}
    output = tmp_path_factory.mktemp("trained")
    config = TrainConfig(**{**SETTINGS, **size, **step, "prompts": prompts_file, "output": output})
    losses: list[float] = []
    return Trained(config, train(config, target=target, watch=lambda info: losses.append(info.loss)), losses)


@pytest.fixture(scope="session")
def finished(target: Target, prompts_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run of two steps without measurements."""
    output = tmp_path_factory.mktemp("finished")
    size = {"max_steps": 2, "eval_prompts": 0}
    config = TrainConfig(**{**SETTINGS, **size, "prompts": prompts_file, "output": output})
    losses: list[float] = []
    return Trained(config, train(config, target=target, watch=lambda info: losses.append(info.loss)), losses)
