"""Branch conditioning: what the children of a draft node are predicted from, given the path that leads to the node."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from jetspec.head import path_children
from jetspec.head.config import HeadConfig
from jetspec.head.path_children import PathChildren
from jetspec.models.target import Target


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


class TransitionChildren(PathChildren):
    """Children by a head's transition.

    A shift of the layers' output adds its product with a token's row of the lm_head to the token's logit.

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
        super().__init__(logits, scale, num_children, num_candidates=path_children.CANDIDATES)
        self.transition, self.target = transition, target
        self.rows = target.lm_head_rows(self.ids).to(transition.out_proj.weight.dtype)

    def shifts(self, depth: int, tokens: Tensor, parents: Tensor) -> Tensor:
        """See `PathChildren.shifts`."""
        sequences, width = tokens.shape
        state = self.parent_states(parents)
        embeds = self.target.embed(tokens).view(sequences * width, 1, -1)
        shift, state = self.transition(embeds, None if state is None else state.unsqueeze(0))
        self.state = state.view(sequences, width, -1)
        return torch.einsum("swh,skh->swk", shift.view(sequences, width, -1), self.rows[:, depth - 1])
