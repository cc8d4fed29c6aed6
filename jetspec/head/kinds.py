"""The kinds of draft heads, by the `method` of their configuration."""

from __future__ import annotations

from jetspec.head.autoregressive import AutoregressiveHead
from jetspec.head.base import DraftHead
from jetspec.head.config import HeadConfig
from jetspec.head.parallel import ParallelHead

HEADS: dict[str, type[DraftHead]] = {"parallel": ParallelHead, "autoregressive": AutoregressiveHead}


def new_head(config: HeadConfig) -> DraftHead:
    """A head of the kind that `config` names, its weights not set."""
    return HEADS[config.method](config)
