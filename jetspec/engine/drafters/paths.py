"""The children of draft nodes where they depend on the path that leads to the node."""

from __future__ import annotations

import torch
from torch import Tensor

from jetspec.head import Transition
from jetspec.models.target import Target
from jetspec.tree import topk_lowest_id

#: Tokens of each depth that are scored anew for every node there.
CANDIDATES = 64


class PathChildren:
    """`grow_trees`' expansion by a head's transition: the best tokens of each depth, scored anew for every node.

    logits [S, D, V] are those of the layers' output, times scale [S]. A shift of the output adds its product with a
    token's row of the lm_head to the token's logit; for tokens that are no candidates it is left out. `num_children`
    bounds the children of a node.
    """

    def __init__(
        self,
        transition: Transition,
        target: Target,
        logits: Tensor,
        scale: Tensor,
        num_children: int | None = None,
    ) -> None:
        self.transition, self.target, self.num_children = transition, target, num_children
        self.scale = scale.view(-1, 1, 1)
        self.logits, self.ids = topk_lowest_id(logits, min(CANDIDATES, logits.shape[-1]))
        self.rows = target.lm_head_rows(self.ids).to(transition.out_proj.weight.dtype)
        # What all others weigh together.
        total = logits.logsumexp(-1)
        share = (self.logits - total.unsqueeze(-1)).exp().sum(-1).clamp(max=1.0)
        self.rest = total + (-share).log1p()
        self.state: Tensor | None = None

    def __call__(self, depth: int, tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
        sequences, width = tokens.shape
        state = None
        if self.state is not None:
            places = parents.unsqueeze(-1).expand(-1, -1, self.state.shape[-1])
            state = self.state.gather(1, places).flatten(0, 1).unsqueeze(0)
        shift, state = self.transition(self.target.embed(tokens).view(sequences * width, 1, -1), state)
        self.state = state.view(sequences, width, -1)
        shift = shift.view(sequences, width, -1)
        shifts = torch.einsum("swh,skh->swk", shift, self.rows[:, depth - 1]).float() * self.scale
        logits = self.logits[:, None, depth - 1] + shifts
        log_probs = logits - logits.logsumexp(-1, keepdim=True).logaddexp(self.rest[:, depth - 1, None, None])
        log_probs, order = log_probs.sort(dim=-1, descending=True, stable=True)
        ids = self.ids[:, None, depth - 1].expand(-1, width, -1).gather(2, order)
        return log_probs[..., : self.num_children], ids[..., : self.num_children]
