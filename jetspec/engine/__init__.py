"""The engine: any number of requests on one target, one flat batch of rows a round."""

from jetspec.engine.draft import Drafter, HeadDrafter
from jetspec.engine.engine import Engine, StepOutput
from jetspec.engine.observer import Committed, Observer, Round
from jetspec.engine.sequence import RequestMetrics, Sequence

__all__ = [
    "Committed",
    "Drafter",
    "Engine",
    "HeadDrafter",
    "Observer",
    "RequestMetrics",
    "Round",
    "Sequence",
    "StepOutput",
]
