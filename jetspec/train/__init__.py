"""Training draft heads: the target's answers, captured states, blocks, loss, loop, evaluation."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jetspec.train.config import TrainConfig
    from jetspec.train.evaluate import Measurement, measure_acceptance
    from jetspec.train.run import TrainResult, train
    from jetspec.train.trainer import StepInfo

__all__ = ["Measurement", "StepInfo", "TrainConfig", "TrainResult", "measure_acceptance", "train"]

_HOMES = {
    "Measurement": "evaluate",
    "StepInfo": "trainer",
    "TrainConfig": "config",
    "TrainResult": "run",
    "measure_acceptance": "evaluate",
    "train": "run",
}


def __getattr__(name: str) -> Any:
    """Public names load on first use: the command line reads the configuration's fields without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'jetspec.train' has no attribute {name!r}")
    return getattr(import_module(f"jetspec.train.{_HOMES[name]}"), name)
