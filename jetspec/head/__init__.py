"""Draft heads: configuration, model, checkpoints."""

from jetspec.head.checkpoint import load_head, save_head, shipped_heads
from jetspec.head.config import HeadConfig
from jetspec.head.model import DraftHead

__all__ = ["DraftHead", "HeadConfig", "load_head", "save_head", "shipped_heads"]
