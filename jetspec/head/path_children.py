"""Children that depend on the path to their node: the best tokens of each depth, scored anew for every node."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from jetspec.tree import topk_lowest_id

#: Tokens of each depth that are scored anew for every node there.
CANDIDATES = 64


class PathChildren(ABC):
    """`grow_trees`' expansion where a node's path shifts the logits of its children.

    A token that is no candidate keeps its logit.

    Args:
        logits: [S, D, V], the same for all nodes of a depth, divided by the temperature.
        scale: [S], one over the temperature.
        num_children: most children of a node; None: all candidates.
        num_candidates: candidates of a depth.
        candidates_only: whether only candidates have a probability.
    """

    def __init__(
        self,
        logits: Tensor,
        scale: Tensor,
        num_children: int | None = None,
        *,
        num_candidates: int,
        candidates_only: bool = False,
    ) -> None:
        self.num_children = num_children
        self.scale = scale.view(-1, 1, 1)
        self.logits, self.ids = topk_lowest_id(logits, min(num_candidates, logits.shape[-1]))
        # What all others weigh together.
        total = logits.logsumexp(-1)
        share = (self.logits - total.unsqueeze(-1)).exp().sum(-1).clamp(max=1.0)
        self.rest = torch.full_like(total, -torch.inf) if candidates_only else total + (-share).log1p()
        self.token_ids = self.ids
        self.state: Tensor | None = None

    @abstractmethod
    def shifts(self, depth: int, tokens: Tensor, parents: Tensor) -> Tensor:
        """What the path adds to the logits [S, W, K] of the candidates at a temperature of 1; see `__call__`."""

    def __call__(self, depth: int, tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
        """The children of a depth's frontier, most probable first.

        Args:
            depth: depth of the children, from 1. Calls go through the depths in order, because each depth's state
                continues the one before.
            tokens: [S, W], the frontier's tokens.
            parents: [S, W], the place of each frontier node's parent in the frontier before.

        Returns:
            Log probabilities and token ids of the children, both [S, W, K].
        """
        shifts = self.shifts(depth, tokens, parents).float() * self.scale
        logits = self.logits[:, None, depth - 1] + shifts
        log_probs = logits - logits.logsumexp(-1, keepdim=True).logaddexp(self.rest[:, depth - 1, None, None])
        log_probs, order = log_probs.sort(dim=-1, descending=True, stable=True)
        ids = self.token_ids[:, None, depth - 1].expand(-1, tokens.shape[1], -1).gather(2, order)
        return log_probs[..., : self.num_children], ids[..., : self.num_children]

    def parent_states(self, parents: Tensor) -> Tensor | None:
        """The states [S * W, size] of the nodes' parents; None before the first depth."""
        if self.state is None:
            return None
        places = parents.unsqueeze(-1).expand(-1, -1, self.state.shape[-1])
        return self.state.gather(1, places).flatten(0, 1)
