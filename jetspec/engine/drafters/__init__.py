"""Drafters: what proposes the trees that the target verifies."""

from jetspec.engine.drafters.autoregressive import AutoregressiveDrafter
from jetspec.engine.drafters.base import CommittedRows, Drafter, HeadDrafter
from jetspec.engine.drafters.draft_model import ModelDrafter
from jetspec.engine.drafters.load import DRAFT_METHODS, head_drafter, load_drafter
from jetspec.engine.drafters.ngram import NgramDrafter
from jetspec.engine.drafters.parallel import ParallelDrafter

__all__ = [
    "DRAFT_METHODS",
    "AutoregressiveDrafter",
    "CommittedRows",
    "Drafter",
    "HeadDrafter",
    "ModelDrafter",
    "NgramDrafter",
    "ParallelDrafter",
    "head_drafter",
    "load_drafter",
]
