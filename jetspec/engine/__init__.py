"""The engine: any number of requests on one target, one flat batch of rows a round."""

from jetspec.engine.batch import Allocation, Round, Selection
from jetspec.engine.budget import AutoBudget, Budget, FixedBudget
from jetspec.engine.config import EngineConfig
from jetspec.engine.drafters import (
    CommittedRows,
    Drafter,
    HeadDrafter,
    ModelDrafter,
    NgramDrafter,
    head_drafter,
)
from jetspec.engine.engine import Engine, StepOutput
from jetspec.engine.observer import Committed, EngineStep, Observer, RoundRecord
from jetspec.engine.sequence import Sequence

__all__ = [
    "Allocation",
    "AutoBudget",
    "Budget",
    "Committed",
    "CommittedRows",
    "Drafter",
    "Engine",
    "EngineConfig",
    "EngineStep",
    "FixedBudget",
    "HeadDrafter",
    "ModelDrafter",
    "NgramDrafter",
    "Observer",
    "Round",
    "RoundRecord",
    "Selection",
    "Sequence",
    "StepOutput",
    "head_drafter",
]
