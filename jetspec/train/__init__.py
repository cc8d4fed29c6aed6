"""Training draft heads: the target's answers, captured states, blocks, loss, loop, evaluation."""

from jetspec.train.config import TrainConfig
from jetspec.train.evaluate import acceptance_length
from jetspec.train.run import TrainResult, train
from jetspec.train.trainer import StepInfo

__all__ = ["StepInfo", "TrainConfig", "TrainResult", "acceptance_length", "train"]
