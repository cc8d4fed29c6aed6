"""The engine: any number of requests on one target, one flat batch of rows a round."""

from jetspec.engine.budget import AutoBudget, Budget, FixedBudget
from jetspec.engine.drafters import CommittedRows, Drafter, HeadDrafter, ModelDrafter, NgramDrafter, load_drafter
from jetspec.engine.engine import Engine, StepOutput
from jetspec.engine.observer import Committed, EngineStep, Observer, RoundRecord
from jetspec.engine.sequence import RequestMetrics, Sequence

__all__ = [
    "AutoBudget",
    "Budget",
    "Committed",
    "CommittedRows",
    "Drafter",
    "Engine",
    "EngineStep",
    "FixedBudget",
    "HeadDrafter",
    "ModelDrafter",
    "NgramDrafter",
    "Observer",
    "RequestMetrics",
    "RoundRecord",
    "Sequence",
    "StepOutput",
    "load_drafter",
]
