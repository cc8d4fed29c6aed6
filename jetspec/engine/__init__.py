"""The engine: any number of requests on one target, one flat batch of rows a round."""

from jetspec.engine.budget import AutoBudget, Budget, FixedBudget
from jetspec.engine.drafters import CommittedRows, Drafter, HeadDrafter, ModelDrafter, NgramDrafter, load_drafter
from jetspec.engine.engine import Engine, StepOutput
from jetspec.engine.observer import Committed, Observer, Round, Step
from jetspec.engine.sequence import RequestMetrics, Sequence

__all__ = [
    "AutoBudget",
    "Budget",
    "Committed",
    "CommittedRows",
    "Drafter",
    "Engine",
    "FixedBudget",
    "HeadDrafter",
    "ModelDrafter",
    "NgramDrafter",
    "Observer",
    "RequestMetrics",
    "Round",
    "Sequence",
    "Step",
    "StepOutput",
    "load_drafter",
]
