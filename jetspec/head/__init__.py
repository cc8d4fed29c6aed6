"""Draft heads: configuration, model, checkpoints."""

from jetspec.head.checkpoint import load_head, save_head, shipped_heads
from jetspec.head.config import HeadConfig
from jetspec.head.model import DraftHead
from jetspec.head.transition import Transition

__all__ = ["DraftHead", "HeadConfig", "Transition", "load_head", "save_head", "shipped_heads"]
