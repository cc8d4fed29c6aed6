"""What a training run needs to go on exactly where it was.

Data order, anchors and learning rate are functions of the step's number, so the state is weights, optimizer and
counters.
"""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from jetspec.train.config import TrainConfig, check_same_run
from jetspec.train.files import write_atomically

FOLDER = "checkpoint"
STATE = "state.pt"


@dataclass
class Progress:
    """Counters of a run after ``step`` optimizer steps."""

    step: int = 0
    window: list[float] = field(default_factory=list)  # losses since the last line of the metrics file
    metrics_bytes: int = 0  # length of the metrics file at that time
    best_acceptance: float = 0.0
    best_step: int = 0
    last_acceptance: float = 0.0
    train_seconds: float = 0.0
    last_loss: float = 0.0


def save_checkpoint(
    config: TrainConfig,
    progress: Progress,
    head: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Write the state in one file, then remove weights of earlier best steps, which nothing refers to any more."""
    folder = config.folder / FOLDER
    buffer = io.BytesIO()
    torch.save(
        {
            "config": config.to_dict(),
            "progress": asdict(progress),
            "head": head.state_dict(),
            "optimizer": optimizer.state_dict(),
        },
        buffer,
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / STATE, buffer.getvalue())
    for path in folder.glob("best-*.safetensors"):
        if path != best_path(folder, progress.best_step):
            path.unlink()


def load_checkpoint(config: TrainConfig) -> dict[str, Any] | None:
    """The saved state of the run in ``config.output``, or None where there is none. ``progress`` is a ``Progress``.

    Raises:
        JetSpecError: the run has another configuration; names the field.
    """
    path = config.folder / FOLDER / STATE
    if not path.exists():
        return None
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    check_same_run(state["config"], config)
    state["progress"] = Progress(**state["progress"])
    return state


def best_path(folder: Path, step: int) -> Path:
    return folder / f"best-{step}.safetensors"


def save_best(folder: Path, step: int, head: torch.nn.Module) -> None:
    """Keep the weights of ``step``; the checkpoint that names it as the best one follows."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    write_atomically(best_path(folder, step), save(weights))


def load_best(folder: Path, step: int) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = load_file(best_path(folder, step))
    return weights
