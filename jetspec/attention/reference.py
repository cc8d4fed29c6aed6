"""The row attention in plain torch: store the new rows' K/V, then attend segment by segment."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from jetspec.attention.cache import KVCache
from jetspec.attention.rows import RowBatch


def row_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: RowBatch,
    cache: KVCache,
    layer: int,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of new rows over their own sequence's committed prefix, their ancestors and themselves.

    q [rows, heads, head_dim]; k, v [rows, kv_heads, head_dim], written to the cache at the rows' slots first.
    Returns [rows, heads, head_dim].
    """
    cache.write(layer, batch.slot_mapping, k, v)
    outputs = []
    for index, segment in enumerate(batch.segments):
        plan = batch.plan(index, window, q.dtype)
        keys, values = cache.read(layer, plan.keys)
        outputs.append(attend(q[segment.start : segment.stop], keys, values, plan.bias, scaling, softcap, sinks))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of n queries over m keys of one sequence; a group of heads shares a key head.

    q [n, heads, head_dim]; k, v [m, kv_heads, head_dim]; mask [n, m]: bool (True = may attend), or float to add to
    the scores, or None; sinks [heads]: logits that join the softmax and attend to nothing. Returns
    [n, heads, head_dim].
    """
    if softcap is not None or sinks is not None:
        return explicit_attention(q, k, v, mask, scaling, softcap, sinks)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=grouped)
    return output.squeeze(0).transpose(0, 1)


def explicit_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """`attend` with the softmax written out, in float32 as transformers does it."""
    n, heads, head_dim = q.shape
    m, kv_heads, _ = k.shape
    grouped_q = q.view(n, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    scores = (grouped_q @ k.permute(1, 2, 0).unsqueeze(1)).float() * scaling  # [kv_heads, group, n, m]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        sink_scores = sinks.float().view(kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink_scores], dim=-1)
    weights = scores.softmax(dim=-1)[..., :m].to(v.dtype)
    output = weights @ v.permute(1, 0, 2).unsqueeze(1)
    return output.permute(2, 0, 1, 3).reshape(n, heads, head_dim)
