"""What a block may attend to: the context before its anchor, and itself."""

from __future__ import annotations

import torch
from torch import Tensor


def block_mask(positions: Tensor, causal: bool, window: int | None) -> Tensor:
    """Which rows of a block see which. positions [.., B] -> bool [.., B, B], True = may attend."""
    query, key = positions.unsqueeze(-1), positions.unsqueeze(-2)
    seen = key <= query if causal else torch.ones_like(key <= query)
    return seen if window is None else seen & (key > query - window)


def context_mask(positions: Tensor, context_positions: Tensor, window: int | None) -> Tensor:
    """Which context rows a block sees. positions [.., B], context_positions [T] -> bool [.., B, T].

    The anchor is a block's first row; the context ends before it.
    """
    seen = (context_positions < positions[..., :1, None]).expand(*positions.shape, len(context_positions))
    return seen if window is None else seen & (context_positions > positions.unsqueeze(-1) - window)
