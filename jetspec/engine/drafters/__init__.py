"""Drafters: what proposes the trees that the target verifies."""

from jetspec.engine.drafters.base import CommittedRows, Drafter
from jetspec.engine.drafters.draft_model import ModelDrafter
from jetspec.engine.drafters.head import HeadDrafter
from jetspec.engine.drafters.load import DRAFT_METHODS, load_drafter
from jetspec.engine.drafters.ngram import NgramDrafter

__all__ = [
    "DRAFT_METHODS",
    "CommittedRows",
    "Drafter",
    "HeadDrafter",
    "ModelDrafter",
    "NgramDrafter",
    "load_drafter",
]
