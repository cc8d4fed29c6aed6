"""A tiny text target, a prompts file and a quick training configuration."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jetspec.models.target import Target
from jetspec.train import TrainConfig
from tests.helpers.tiny import tiny_target


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
        settings: dict[str, Any] = {
            "target": "tiny",
            "prompts": prompts_file,
            "output": tmp_path / name,
            "eval_prompts": 4,
            "max_prompts": 12,
            "max_tokens": 24,
            "num_layers": 2,
            "block_size": 4,
            "num_aux_layers": 2,
            "transition_size": 0,
            "blocks_per_step": 24,
            "blocks_per_sequence": 8,
            "max_steps": 8,
            "log_every": 2,
            "eval_every": 4,
            "eval_max_tokens": 12,
            "eval_budgets": (4, 8),
            "shard_sequences": 5,
            "learning_rate": 3e-3,
            "dtype": "float32",
        }
        return TrainConfig(**{**settings, **changes})

    return make
