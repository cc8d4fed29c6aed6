"""The row attention in plain torch: store the new rows' keys and values, then attend segment by segment.

Shapes:
    rows      new tokens of a batch, all sequences end to end; n of them in one segment
    m         keys of one segment: its committed context, then its n rows
    heads     query heads; kv_heads divides it, and each group of heads / kv_heads of them shares a key head
    head_dim  width of one head of queries and keys; values may have another width, which outputs then have, too
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from jetspec.attention.cache import KVCache
from jetspec.attention.rows import RowBatch, Window

AttendFunction = Callable[..., Tensor]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from n queries to m keys of one sequence; a group of heads shares a key head.

    A masked key or value that is not finite spoils the output, as a weight of zero does not silence it; see
    `attend_visible`.

    Args:
        q: [n, heads, head_dim].
        k: [m, kv_heads, head_dim].
        v: [m, kv_heads, head_dim].
        mask: [n, m], bool (True: may attend) or float (added to the scores); None: every query sees every key.
        scaling: what scores are multiplied by.
        softcap: bound of the scores; None: none.
        sinks: [heads], logits that join the softmax and attend to nothing.

    Returns:
        [n, heads, head_dim].
    """
    if softcap is not None or sinks is not None:
        return explicit_attention(q, k, v, mask, scaling, softcap, sinks)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    output = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=grouped)
    return output.squeeze(0).transpose(0, 1)


def attend_visible(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`attend`, except that a masked key never enters, even where it or its value is not finite.

    It takes two attentions, so it is for rows that are known to hold such values.
    """
    if mask is None:
        return attend(q, k, v, mask, scaling, softcap, sinks)
    spoiled = ~(k.isfinite() & v.isfinite()).all(dim=2).all(dim=1)
    visible = mask if mask.dtype == torch.bool else mask == 0
    sees_spoiled = (visible & spoiled).any(dim=1)
    finite_k, finite_v = (x.masked_fill(spoiled[:, None, None], 0.0) for x in (k, v))
    rest = attend(q, finite_k, finite_v, mask, scaling, softcap, sinks)
    if not bool(sees_spoiled.any()):
        return rest
    return torch.where(sees_spoiled[:, None, None], attend(q, k, v, mask, scaling, softcap, sinks), rest)


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
    return output.permute(2, 0, 1, 3).reshape(n, heads, v.shape[-1])


def row_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: RowBatch,
    cache: KVCache,
    layer: int,
    scaling: float,
    window: Window = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kernel: AttendFunction = attend,
) -> Tensor:
    """Attend from new rows to their own sequence's committed prefix, their ancestors and themselves.

    Args:
        q: [rows, heads, head_dim].
        k: [rows, kv_heads, head_dim]. Keys and values are first written to the cache, at the rows' slots.
        v: [rows, kv_heads, head_dim].
        batch: the rows.
        cache: keys and values of all sequences.
        layer: the layer of the cache.
        scaling: what scores are multiplied by.
        window: keys that a row sees back to and including its own, or the chunks that it sees; None: all.
        softcap: bound of the scores; None: none.
        sinks: [heads], as in `attend`.
        kernel: the attention of one segment: `attend`, or `attend_visible` where rows may not be finite.

    Returns:
        [rows, heads, head_dim].
    """
    cache.write(layer, batch.slot_mapping, k, v)
    outputs = []
    for index, segment in enumerate(batch.segments):
        plan = batch.plan(index, window, q.dtype)
        keys, values = cache.read(layer, plan.keys)
        outputs.append(kernel(q[segment.start : segment.stop], keys, values, plan.bias, scaling, softcap, sinks))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
