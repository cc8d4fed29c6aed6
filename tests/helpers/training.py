"""Small training runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jetspec.train import TrainConfig, TrainResult

#: A small run: a few short answers, two layers, eight steps.
SETTINGS: dict[str, Any] = {
    "target": "tiny",
    "eval_prompts": 3,
    "max_prompts": 8,
    "max_tokens": 16,
    "num_layers": 2,
    "block_size": 4,
    "num_aux_layers": 2,
    "transition_size": 0,
    "blocks_per_step": 24,
    "blocks_per_sequence": 8,
    "max_steps": 8,
    "log_every": 2,
    "eval_every": 4,
    "eval_max_tokens": 8,
    "eval_budgets": (4, 8),
    "shard_sequences": 5,
    "learning_rate": 3e-3,
    "dtype": "float32",
}


@dataclass(frozen=True)
class Trained:
    """A finished run, and the loss of each of its steps."""

    config: TrainConfig
    result: TrainResult
    losses: list[float]
