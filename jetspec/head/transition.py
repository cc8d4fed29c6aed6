"""Branch conditioning: what the children of a draft node are predicted from, given the path that leads to the node."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from jetspec.head.config import HeadConfig
from jetspec.models.target import Target
from jetspec.tree import topk_lowest_id

#: Tokens of each depth that a transition scores anew for every node there.
CANDIDATES = 64


class Transition(nn.Module):
    """A small recurrent network that runs along the branches of a tree, beside the layers' one pass.

    The layers give one hidden state a depth, the same for every node there. The network reads the tokens of a path,
    from the anchor on, and shifts that state, so that a node's children depend on the path to it: for the price of a
    few small products a node, and through the target's own embedding and lm_head.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.input_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gru = nn.GRU(config.hidden_size, config.transition_size, batch_first=True)
        self.out_proj = nn.Linear(config.transition_size, config.hidden_size, bias=False)

    def forward(self, embeds: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What is added to the layers' output at consecutive depths, given the tokens before them.

        embeds [N, D, hidden] are the target's embeddings of the tokens at depths d - 1 .. d + D - 2 of N paths (depth 0
        is the anchor), state [1, N, size] what the paths came to before (None: nothing lies before the anchor).
        Returns the shifts [N, D, hidden] of depths d .. d + D - 1 and the new state.
        """
        steps, state = self.gru(self.input_norm(embeds.to(self.out_proj.weight.dtype)), state)
        return self.out_proj(steps), state

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """Draw the weights; the output starts at zero, so that a fresh transition shifts nothing."""
        for parameter in self.gru.parameters():
            bound = self.gru.hidden_size**-0.5
            parameter.uniform_(-bound, bound, generator=generator)
        self.input_norm.weight.fill_(1.0)
        self.out_proj.weight.zero_()


class TransitionChildren:
    """`grow_trees`' expansion by a head's transition: the best tokens of each depth, scored anew for every node.

    A shift of the layers' output adds its product with a token's row of the lm_head to the token's logit. For tokens
    that are no candidates it is left out.

    Args:
        transition: the head's.
        target: whose embedding and lm_head the head borrows.
        logits: [S, D, V], those of the layers' output, divided by the temperature.
        scale: [S], one over the temperature.
        num_children: most children of a node; None: all candidates.
    """

    def __init__(
        self, transition: Transition, target: Target, logits: Tensor, scale: Tensor, num_children: int | None = None
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
        """The children of a depth's frontier, most probable first.

        Args:
            depth: depth of the children, from 1. Calls go through the depths in order, because each depth's state
                continues the one before.
            tokens: [S, W], the frontier's tokens.
            parents: [S, W], the place of each frontier node's parent in the frontier before.

        Returns:
            Log probabilities and token ids of the children, both [S, W, K].
        """
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
