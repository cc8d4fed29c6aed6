"""The run's log: one JSON object a line, and a tracker such as TensorBoard beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jetspec.errors import JetSpecError


class MetricsFile:
    """Appends to ``path`` after its first ``size`` bytes: what was written after a checkpoint is written again.

    ``tracker`` is one of ``accelerate.tracking``; it gets the numbers, nested ones under names like ``depths/16/1``.
    """

    def __init__(self, path: Path, size: int, tracker: Any = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        self._file.truncate(size)
        self._tracker = tracker

    def write(self, step: int, **values: Any) -> int:
        """Write a line; returns the length of the file."""
        self._file.write(json.dumps({"step": step, **values}).encode() + b"\n")
        self._file.flush()
        if self._tracker is not None:
            self._tracker.log(dict(_flat(values)), step=step)
        return self._file.tell()

    def close(self) -> None:
        """Close the file and finish the tracker."""
        self._file.close()
        if self._tracker is not None:
            self._tracker.finish()


def check_tracker(name: str | None) -> None:
    """JetSpecError where the tracker's package is missing."""
    from accelerate.utils import is_tensorboard_available, is_wandb_available

    available = {"tensorboard": is_tensorboard_available, "wandb": is_wandb_available}
    if name is not None and not available[name]():
        raise JetSpecError(f"log_with={name!r}: not installed; `pip install {name}`")


def open_tracker(name: str | None, folder: Path, config: dict[str, Any], *, run_id: str, first_step: int) -> Any:
    """The tracker, or None; a run that goes on from ``first_step`` continues its curves."""
    if name is None:
        return None
    from accelerate.tracking import TensorBoardTracker, WandBTracker

    if name == "tensorboard":
        tracker: Any = TensorBoardTracker("tensorboard", folder, purge_step=first_step)
    else:
        tracker = WandBTracker("jetspec", id=run_id, resume="allow", dir=str(folder), config=config)
    tracker.start()
    return tracker


def _flat(values: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Numbers by path; entries of lists count from 1."""
    if isinstance(values, (int, float)):
        yield prefix, values
        return
    for key, value in values.items() if isinstance(values, dict) else enumerate(values, 1):
        yield from _flat(value, f"{prefix}/{key}" if prefix else str(key))
