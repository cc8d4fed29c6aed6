"""Leave out improbable tokens: top-k, top-p and min-p over scores [V], which they never change in place."""

import math

import torch
from torch import Tensor

#: How many of the most probable tokens top-p looks at first; it looks at 8 times as many until they suffice.
_FIRST_WIDTH = 256


def best_first(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of scores [V] and all that equal the last of them: (scores, ids), equal ones by id."""
    ids = (scores >= scores.topk(k).values[-1]).nonzero().squeeze(1)
    values, order = scores[ids].sort(descending=True, stable=True)
    return values, ids[order]


def top_k(scores: Tensor, k: int) -> Tensor:
    """Keep the k best scores and all that equal the last of them."""
    if k >= len(scores):
        return scores
    return scores.masked_fill(scores < scores.topk(k).values[-1], -torch.inf)


def top_p(scores: Tensor, p: float) -> Tensor:
    """Keep the fewest most probable tokens whose probabilities reach p, of equal ones those with the lower ids."""
    total = scores.logsumexp(0)
    width = min(_FIRST_WIDTH, len(scores))
    while True:
        values, ids = best_first(scores, width)
        probabilities = (values - total).double().exp()
        before = probabilities.cumsum(0) - probabilities
        kept = before < p
        if width == len(scores) or not bool(kept.all()):
            return torch.full_like(scores, -torch.inf).index_copy(0, ids[kept], values[kept])
        width = min(8 * width, len(scores))


def min_p(scores: Tensor, p: float) -> Tensor:
    """Keep tokens at least p times as probable as the most probable one."""
    return scores.masked_fill(scores < scores.max() + math.log(p), -torch.inf)
