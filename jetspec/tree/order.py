"""Selection whose ties break by position, so that the same numbers always select the same items."""

import torch
from torch import Tensor


def first_by_value(values: Tensor, k: int) -> Tensor:
    """Positions of the k largest of values [S, M] float32 <= 0, ties to the lower position -> [S, k], best first.

    The bits of a non-negative float order like the float, so (bits, position) packs into one integer key without ties.
    """
    magnitude = (-values).abs().view(torch.int32).long()
    keys = (magnitude << 32) + torch.arange(values.shape[-1], device=values.device)
    return keys.topk(k, dim=-1, largest=False).values & 0xFFFFFFFF


def topk_lowest_id(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of values [..., V] and their ids, each [..., k], largest first, ties to the lower id."""
    width = values.shape[-1]
    flat = values.reshape(-1, width)
    top, ids = flat.topk(min(k + 1, width), dim=-1)
    if k < width:
        # topk returns any of several equal values at the border: choose again where there are some.
        tied = (top[:, k - 1] == top[:, k]).nonzero().squeeze(1)
        top, ids = top[:, :k].contiguous(), ids[:, :k].contiguous()
        if len(tied):
            ids[tied] = _lowest_ids(flat[tied], top[tied, k - 1 :], k)
            top[tied] = flat[tied].gather(1, ids[tied])
    ids, by_id = ids.sort(dim=-1)
    top, by_value = top.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    shape = (*values.shape[:-1], k)
    return top.reshape(shape), ids.gather(1, by_value).reshape(shape)


def _lowest_ids(values: Tensor, border: Tensor, k: int) -> Tensor:
    """Ids [R, k] of all values [R, V] above border [R, 1] and of the first ones equal to it, in id order."""
    above, equal = ~(values <= border), values == border  # NaN is above, as it is for topk
    room = k - above.sum(dim=-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(dim=-1) <= room))
    return chosen.nonzero()[:, 1].reshape(-1, k)
