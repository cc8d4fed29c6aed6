"""Short causal convolutions over rows: each row reads its ancestors, then the committed columns before them."""

from __future__ import annotations

import torch
from torch import Tensor

from jetspec.recurrent.plan import RowPlan


def convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None, columns: Tensor, plan: RowPlan) -> Tensor:
    """A depthwise convolution along every row's own path.

    Args:
        inputs: [rows, channels].
        weight: [channels, width]; the last entry weighs the row itself.
        bias: [channels], or None.
        columns: [segments, width - 1, channels], the committed inputs before the rows, oldest first.
        plan: the rows.

    Returns:
        [rows, channels] in the dtype of the weight.
    """
    channels, width = weight.shape
    known = torch.cat([columns.to(weight.dtype).reshape(-1, channels), inputs.to(weight.dtype)])
    taps = plan.taps(width)
    output = known[taps[:, 0]] * weight[:, 0]
    for tap in range(1, width):
        output = output + known[taps[:, tap]] * weight[:, tap]
    return output if bias is None else output + bias


def columns_after(inputs: Tensor, columns: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    """The committed columns once some rows are committed.

    Args:
        inputs: [rows, channels] of the forward.
        columns: [s, past, channels] before.
        rows: [s, n] int64, the accepted rows of each sequence in order, then padding.
        counts: [s] int64, how many were accepted.

    Returns:
        [s, past, channels].
    """
    past = columns.shape[1]
    known = torch.cat([columns, inputs[rows].to(columns.dtype)], dim=1)
    last = counts[:, None] + torch.arange(past, device=rows.device)
    return known.gather(1, last[..., None].expand(-1, -1, known.shape[2]))
