"""Draft heads: configuration, models, checkpoints."""

from jetspec.head.autoregressive import AutoregressiveHead
from jetspec.head.base import DraftHead
from jetspec.head.build import copy_weights, head_for_target, new_head
from jetspec.head.checkpoint import (
    CARD_FILES,
    head_directory,
    load_head,
    save_for_speculators,
    save_head,
    shipped_heads,
)
from jetspec.head.config import HeadConfig
from jetspec.head.parallel import ParallelHead
from jetspec.head.transition import Transition

__all__ = [
    "CARD_FILES",
    "AutoregressiveHead",
    "DraftHead",
    "HeadConfig",
    "ParallelHead",
    "Transition",
    "copy_weights",
    "head_directory",
    "head_for_target",
    "load_head",
    "new_head",
    "save_for_speculators",
    "save_head",
    "shipped_heads",
]
