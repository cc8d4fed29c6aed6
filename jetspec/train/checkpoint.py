"""Checkpoints: the state from which a run resumes exactly where it stopped.

Data order, anchors, negatives and learning rate are functions of the step's number, so there is no random state:
weights, optimizer and counters are all. They do not depend on the number of processes.
"""

from __future__ import annotations

import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from jetspec.files import atomic_file, write_atomically
from jetspec.train.config import TrainConfig, check_same_run
from jetspec.train.evaluate import Measurement

FOLDER = "checkpoint"


@dataclass
class Progress:
    """Counters of a run after ``step`` optimizer steps."""

    step: int = 0
    window: list[float] = field(default_factory=list)  # losses since the last line of the metrics file
    metrics_bytes: int = 0  # length of the metrics file at that time
    best: list[Measurement] = field(default_factory=list)  # a measurement for each budget
    best_step: int = 0
    last: list[Measurement] = field(default_factory=list)
    last_step: int = 0
    train_seconds: float = 0.0
    last_loss: float = 0.0
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex[:8])  # for trackers that continue a run

    def measured(self, step: int) -> list[Measurement]:
        """What is known of the weights after ``step``; empty where they were not measured."""
        known = {self.last_step: self.last, self.best_step: self.best}
        return known.get(step, [])

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Progress:
        """Counters from the plain values of a checkpoint."""
        measured = {name: [Measurement(**m) for m in values[name]] for name in ("best", "last")}
        return cls(**{**values, **measured})


def save_checkpoint(
    config: TrainConfig, progress: Progress, head: dict[str, Tensor], optimizer: dict[str, Any]
) -> None:
    """Write the whole states of head and optimizer, then remove all but the newest ``keep_checkpoints``."""
    folder = config.folder / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    state = {"config": config.to_dict(), "progress": asdict(progress), "head": head, "optimizer": optimizer}
    with atomic_file(folder / f"step-{progress.step}.pt") as file:
        torch.save(state, file)
    kept = _steps(folder, "step-*.pt")[-config.keep_checkpoints :]
    _remove(folder, "step-*.pt", keep=kept)
    # A kept checkpoint's best weights are the latest before it.
    best = _steps(folder, "best-*.safetensors")
    _remove(folder, "best-*.safetensors", keep=[max((b for b in best if b <= step), default=0) for step in kept])


def load_checkpoint(config: TrainConfig) -> dict[str, Any] | None:
    """The newest saved state of the run in ``config.output``, or None where there is none.

    ``progress`` is a ``Progress``. Tensors are mapped, not read, until they are used.

    Raises:
        JetSpecError: the run has another configuration; names the field.
    """
    steps = _steps(config.folder / FOLDER, "step-*.pt")
    if not steps:
        return None
    path = config.folder / FOLDER / f"step-{steps[-1]}.pt"
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    check_same_run(state["config"], config)
    state["progress"] = Progress.from_dict(state["progress"])
    return state


def save_best(folder: Path, step: int, head: dict[str, Tensor]) -> None:
    """Keep the weights of ``step``; the checkpoint that names it as the best one follows."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in head.items()}
    write_atomically(folder / f"best-{step}.safetensors", save(weights))


def load_best(folder: Path, step: int) -> dict[str, Tensor]:
    """The weights that ``save_best`` kept for ``step``."""
    weights: dict[str, Tensor] = load_file(folder / f"best-{step}.safetensors")
    return weights


def forget_after(folder: Path, step: int) -> None:
    """Remove the best weights after ``step``, from which the run now resumes."""
    _remove(folder, "best-*.safetensors", keep=[s for s in _steps(folder, "best-*.safetensors") if s <= step])


def _steps(folder: Path, pattern: str) -> list[int]:
    """The numbers in the names of files, in order."""
    return sorted(_step(path) for path in folder.glob(pattern))


def _step(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _remove(folder: Path, pattern: str, *, keep: list[int]) -> None:
    for path in folder.glob(pattern):
        if _step(path) not in keep:
            path.unlink()
