"""The target's logits after a context, from a plain forward: no draft, no cache of earlier rounds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from jetspec.attention import RowBatch
from jetspec.models.target import Target

#: Rows of one forward at most, unless a single context is longer.
MAX_NUM_BATCHED_TOKENS = 1024


def next_logits(target: Target, contexts: Sequence[list[int]]) -> Tensor:
    """The target's logits for the token after each context: float64, on the CPU, `[len(contexts), vocab]`.

    Contexts run together, as many in one forward as `MAX_NUM_BATCHED_TOKENS` allows.
    """
    rows: list[Tensor] = []
    start = 0
    while start < len(contexts):
        stop = start + 1
        while stop < len(contexts) and sum(map(len, contexts[start : stop + 1])) <= MAX_NUM_BATCHED_TOKENS:
            stop += 1
        rows.append(_chain_logits(target, contexts[start:stop]))
        start = stop
    return torch.cat(rows)


@torch.inference_mode()
def _chain_logits(target: Target, contexts: Sequence[list[int]]) -> Tensor:
    ends = list(accumulate(len(context) for context in contexts))
    slots = [torch.arange(end - len(context), end) for context, end in zip(contexts, ends, strict=True)]
    batch = RowBatch.chains(contexts, slots)
    cache = target.new_cache(num_blocks=len(batch), block_size=1)
    return target.forward(batch, cache, torch.tensor(ends) - 1).logits.double().cpu()
