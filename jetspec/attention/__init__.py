"""Attention over rows: the batch type, the K/V storage, and the reference implementation."""

from jetspec.attention.cache import KVCache
from jetspec.attention.reference import attend, row_attention
from jetspec.attention.rows import RowBatch, Segment

__all__ = ["KVCache", "RowBatch", "Segment", "attend", "row_attention"]
