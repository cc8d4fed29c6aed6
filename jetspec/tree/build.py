"""Draft trees: per sequence the root and the most probable nodes, built depth by depth for the whole batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from jetspec.errors import JetSpecError
from jetspec.tree.forest import Forest
from jetspec.tree.order import first_by_value, topk_lowest_id

Expand = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(depth, frontier tokens [S, W], their parents [S, W]) -> log probabilities and ids of each frontier node's children,
most probable first, each [S, W, K], or [S, 1, K] where all nodes of a depth share one list. Parents are places in the
frontier before, so that a caller can carry a state along the paths; the first frontier is the root alone."""


@dataclass(frozen=True)
class _Level:
    """The nodes kept at one depth, [S, W] each, in (parent, rank) order; parents index the level before."""

    log_probs: Tensor  # -inf: no node
    tokens: Tensor
    parents: Tensor


def top_candidates(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most probable tokens of logits [..., V]: log probabilities (float32) and ids, each [..., min(k, V)].

    Largest logit first, equal logits by the lower id.
    """
    top, ids = topk_lowest_id(logits, min(k, logits.shape[-1]))
    return top.float() - logits.float().logsumexp(dim=-1, keepdim=True), ids


def shared_children(log_probs: Tensor, candidates: Tensor) -> Expand:
    """Expansion by per-depth marginals [S, D, K]: every node at depth d - 1 has the children candidates[:, d - 1]."""

    def expand(depth: int, _tokens: Tensor, _parents: Tensor) -> tuple[Tensor, Tensor]:
        return log_probs[:, depth - 1, None], candidates[:, depth - 1, None]

    return expand


def grow_trees(
    anchors: Tensor,
    expand: Expand,
    depth: int,
    budgets: Sequence[int],
    max_depths: Sequence[int] | None = None,
    *,
    narrow: bool = False,
) -> Forest:
    """Per sequence the root and the budget - 1 most probable nodes of depth <= `depth`, for anchors [S].

    Ties break by (depth, parent, rank). Nodes of probability 0 are left out, so a tree can be smaller than its budget.
    `narrow` expands only nodes that the better ones found so far leave room for. The trees are the same; it pays where
    an expansion costs more than waiting for the device at every depth.
    Raises JetSpecError where budgets or max_depths do not fit the batch.
    """
    limits = [depth] * len(budgets) if max_depths is None else list(max_depths)
    _check(len(anchors), budgets, limits)
    width = max(budgets, default=1) - 1
    deepest = min(depth, max(limits, default=0)) if width else 0

    device = anchors.device
    roots = anchors.long().unsqueeze(1)
    level = _Level(torch.zeros(roots.shape, device=device), roots, torch.zeros_like(roots))
    levels = [level]
    allowed, sizes = torch.tensor(limits, device=device), torch.tensor(list(budgets), device=device)
    for d in range(1, deepest + 1):
        level = _next_level(level, *expand(d, level.tokens, level.parents), width, allowed >= d)
        if narrow:
            level = _within_reach(level, levels, sizes)
        levels.append(level)
        if not level.tokens.shape[1]:
            break
    return _select(levels, sizes, width)


def _check(sequences: int, budgets: Sequence[int], limits: Sequence[int]) -> None:
    if len(budgets) != sequences or len(limits) != sequences:
        raise JetSpecError(
            f"budgets ({len(budgets)}) and max_depths ({len(limits)}) need one entry for each of {sequences} anchors"
        )
    if min(budgets, default=1) < 1:
        raise JetSpecError(f"budgets must be at least 1 (the root), got {min(budgets)}; use 1 for plain decoding")
    if min(limits, default=0) < 0:
        raise JetSpecError(f"max_depths must be at least 0 (the root alone), got {min(limits)}")


def _next_level(level: _Level, log_probs: Tensor, ids: Tensor, width: int, allowed: Tensor) -> _Level:
    """The `width` most probable children of a level; no tree of width + 1 nodes can use another one."""
    # A child needs its better siblings in the tree as well, so ranks from `width` on are out of reach.
    log_probs, ids = log_probs[..., :width].float(), ids[..., :width]
    ranks = ids.shape[-1]
    # Clamped: rounding must not let a path gain by growing. NaN becomes "no node".
    paths = (level.log_probs.unsqueeze(2) + log_probs.clamp(max=0)).flatten(1)
    paths = torch.where((paths > -torch.inf) & allowed.unsqueeze(1), paths, -torch.inf)

    kept = first_by_value(paths, min(width, paths.shape[1])).sort(dim=1).values
    tokens = ids.expand(-1, level.tokens.shape[1], -1).flatten(1).gather(1, kept)
    return _Level(paths.gather(1, kept), tokens, kept // ranks)


def _within_reach(level: _Level, above: list[_Level], budgets: Tensor) -> _Level:
    """A level without the nodes that no tree has room for, as far as the nodes known by now tell."""
    known = torch.cat([one.log_probs for one in (*above, level)], dim=1).sort(dim=1, descending=True).values
    last = known.gather(1, (budgets - 1).clamp(max=known.shape[1] - 1).unsqueeze(1))
    out_of_reach = (level.log_probs < last) | (level.log_probs == -torch.inf)
    count = int((~out_of_reach).sum(dim=1).max())
    kept = out_of_reach.int().argsort(dim=1, stable=True)[:, :count]
    return _Level(*(part.gather(1, kept) for part in (level.log_probs, level.tokens, level.parents)))


def _select(levels: list[_Level], budgets: Tensor, width: int) -> Forest:
    """The most probable nodes of all levels within each sequence's budget, renumbered."""
    starts = [0, *accumulate(level.tokens.shape[1] for level in levels)]
    log_probs = torch.cat([level.log_probs for level in levels], dim=1)
    tokens = torch.cat([level.tokens for level in levels], dim=1)
    parents = torch.cat([level.parents + starts[max(d - 1, 0)] for d, level in enumerate(levels)], dim=1)
    depths = torch.cat([torch.full_like(level.tokens, d) for d, level in enumerate(levels)], dim=1)

    # Positions follow (depth, parent, rank), so ties go to the lower position, and sorting restores the order.
    nodes = starts[-1]
    best = first_by_value(log_probs, min(width + 1, nodes))
    wanted = torch.arange(best.shape[1], device=best.device) < budgets.unsqueeze(1)
    wanted &= log_probs.gather(1, best) > -torch.inf
    kept = torch.where(wanted, best, nodes).sort(dim=1).values
    present = kept < nodes
    kept_or_root = torch.where(present, kept, 0)
    # A kept node's parent is kept too, so the parent's place among the kept positions is its new index.
    new_parents = torch.searchsorted(kept, parents.gather(1, kept_or_root))
    new_parents[:, 0] = -1

    columns = torch.stack([tokens.gather(1, kept_or_root), new_parents, depths.gather(1, kept_or_root), present.long()])
    flat_tokens, flat_parents, flat_depths, flat_present = columns.cpu().flatten(1)
    chosen = flat_present.bool()
    sizes = chosen.view(kept.shape).sum(dim=1).tolist()
    return Forest(
        tokens=flat_tokens[chosen],
        parents=flat_parents[chosen],
        depths=flat_depths[chosen],
        log_probs=log_probs.gather(1, kept_or_root).cpu().flatten()[chosen],
        offsets=[0, *accumulate(sizes)],
    )
