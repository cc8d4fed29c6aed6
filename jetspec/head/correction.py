"""Corrections of published parallel heads: what the path to a draft node adds to the logits of its children.

Each correction is the product of a query, computed from the node's path, with a row of a table for every candidate. So
only the rows of the candidates are needed, and the query is small.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from jetspec.head import path_children
from jetspec.head.base import DraftHead
from jetspec.head.config import HeadConfig
from jetspec.head.options import CorrectionConfig
from jetspec.head.path_children import PathChildren
from jetspec.models.target import Target


class Nodes(NamedTuple):
    """N nodes whose children lie at one depth."""

    depth: int  # of the children, from 1
    tokens: Tensor  # [N]
    embeds: Tensor | None  # [N, hidden], of the tokens; None where the correction does not read them
    hidden: Tensor  # [N, hidden], what the layers predict the children from
    state: Tensor | None  # [N, size], of the nodes' parents; None for the anchor


class Correction(nn.Module, ABC):
    """One kind of correction; its tensors have the publisher's names."""

    #: Whether a query reads the embeddings of the tokens.
    reads_embeddings = False

    @abstractmethod
    def query(self, nodes: Nodes) -> tuple[Tensor | None, Tensor | None]:
        """Queries [N, rank] of nodes, None for no correction at this depth; and their states.

        The states are [N, size], None for a correction that keeps none.
        """

    @abstractmethod
    def rows(self, ids: Tensor) -> Tensor:
        """The table's rows [.., rank] of ids [..] in the head's own vocabulary."""


class DominoCorrection(Correction):
    """A recurrent network over the path's tokens, joined with the layers' output in a two-layer network.

    The first `skip` drafted tokens are not corrected.

    Source: sgl-project/SpecForge, specforge/modeling/draft/domino.py (prefix_gru, embed_proj, apply_logits_head).
    """

    reads_embeddings = True

    def __init__(self, config: HeadConfig, options: CorrectionConfig) -> None:
        super().__init__()
        size, vocab_size = options.state_size, config.draft_vocab_size or config.vocab_size
        self.skip = options.skip
        self.prefix_gru = nn.GRU(config.hidden_size, size, batch_first=True, bias=False)
        self.embed_proj = nn.Sequential(
            nn.Linear(config.hidden_size + size, options.rank, bias=False),
            nn.SiLU(),
            nn.Linear(options.rank, vocab_size, bias=False),
        )

    def query(self, nodes: Nodes) -> tuple[Tensor | None, Tensor | None]:
        """See `Correction.query`."""
        assert nodes.embeds is not None
        weight: Tensor = self.prefix_gru.all_weights[0][0]
        embeds = nodes.embeds.to(weight.dtype).unsqueeze(1)
        _, after = self.prefix_gru(embeds, None if nodes.state is None else nodes.state.unsqueeze(0))
        if nodes.depth <= self.skip:
            return None, after[0]
        joined = torch.cat((nodes.hidden, after[0].to(nodes.hidden.dtype)), dim=-1)
        query: Tensor = self.embed_proj[1](self.embed_proj[0](joined))
        return query, after[0]

    def rows(self, ids: Tensor) -> Tensor:
        """See `Correction.rows`."""
        table = self.embed_proj[2].weight
        assert isinstance(table, Tensor)
        return table[ids]


class MarkovCorrection(Correction):
    """A low-rank table of token pairs: the newest token's row, gated or carried along the path in two of the forms.

    Source: sgl-project/SpecForge, specforge/modeling/draft/dspark.py, and deepseek-ai/DeepSpec,
    deepspec/modeling/dspark/markov_head.py.
    """

    def __init__(self, config: HeadConfig, options: CorrectionConfig) -> None:
        super().__init__()
        rank = options.rank
        self.form = options.form
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size or config.vocab_size, bias=False)
        if self.form == "gated":
            self.gate_proj = nn.Linear(config.hidden_size + rank, rank)
        elif self.form == "rnn":
            self.joint_proj = nn.Linear(config.hidden_size + 2 * rank, 3 * rank)

    def query(self, nodes: Nodes) -> tuple[Tensor | None, Tensor | None]:
        """See `Correction.query`."""
        hidden = nodes.hidden
        newest: Tensor = self.markov_w1(nodes.tokens)
        if self.form == "vanilla":
            return newest, None
        if self.form == "gated":
            return self.gate_proj(torch.cat((hidden, newest), dim=-1)).sigmoid() * newest, None
        state = torch.zeros_like(newest) if nodes.state is None else nodes.state
        gate, candidate, output = self.joint_proj(torch.cat((state, newest, hidden), dim=-1)).chunk(3, dim=-1)
        gate = gate.sigmoid()
        return output.tanh(), gate * state + (1 - gate) * candidate.tanh()

    def rows(self, ids: Tensor) -> Tensor:
        """See `Correction.rows`."""
        return self.markov_w2.weight[ids]


class SelectorCorrection(Correction):
    """A bilinear score of token pairs that the layers' output weighs; only `top_k` candidates a depth are in question.

    Source: vllm-project/vllm, vllm/model_executor/models/qwen3_dflash2.py (CandidateSelector), and
    vllm-project/speculators, src/speculators/models/dflash2/model_definitions.py.
    """

    def __init__(self, config: HeadConfig, options: CorrectionConfig) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, options.rank))
        self.successor_codebook = nn.Parameter(torch.empty(config.vocab_size, options.rank))
        self.hidden_projection = nn.Linear(config.hidden_size, options.rank, bias=False)

    def query(self, nodes: Nodes) -> tuple[Tensor | None, Tensor | None]:
        """See `Correction.query`."""
        return self.predecessor_codebook[nodes.tokens] * self.hidden_projection(nodes.hidden), None

    def rows(self, ids: Tensor) -> Tensor:
        """See `Correction.rows`."""
        return self.successor_codebook[ids]


CORRECTIONS: dict[str, Callable[[HeadConfig, CorrectionConfig], Correction]] = {
    "domino": DominoCorrection,
    "markov": MarkovCorrection,
    "selector": SelectorCorrection,
}


def new_correction(config: HeadConfig) -> Correction | None:
    """The correction that a head's configuration names, its weights not set."""
    options = config.correction
    if options is None:
        return None
    return CORRECTIONS[options.kind](config, options)


class CorrectedChildren(PathChildren):
    """Children by a head's correction.

    Args:
        correction: the head's.
        head: whose embedding and vocabulary apply.
        target: whose embedding the head borrows.
        hidden: [S, D, hidden], what the layers predict each depth from.
        logits: [S, D, V], those of `hidden`, divided by the temperature.
        scale: [S], one over the temperature.
        num_children: most children of a node; None: all candidates.
    """

    def __init__(
        self,
        correction: Correction,
        head: DraftHead,
        target: Target,
        hidden: Tensor,
        logits: Tensor,
        scale: Tensor,
        num_children: int | None = None,
    ) -> None:
        options = head.config.correction
        assert options is not None
        super().__init__(
            logits,
            scale,
            num_children,
            num_candidates=options.top_k or path_children.CANDIDATES,
            candidates_only=options.top_k > 0,
        )
        self.correction, self.head, self.target = correction, head, target
        self.hidden = hidden.to(head.dtype)
        self.rows = correction.rows(self.ids)
        self.token_ids = head.target_ids(self.ids)

    def shifts(self, depth: int, tokens: Tensor, parents: Tensor) -> Tensor:
        """See `PathChildren.shifts`."""
        sequences, width = tokens.shape
        embeds = self.head.embed(tokens, self.target).flatten(0, 1) if self.correction.reads_embeddings else None
        hidden = self.hidden[:, depth - 1, None].expand(-1, width, -1).flatten(0, 1)
        nodes = Nodes(depth, tokens.flatten(), embeds, hidden, self.parent_states(parents))
        query, state = self.correction.query(nodes)
        self.state = None if state is None else state.view(sequences, width, -1)
        rows = self.rows[:, depth - 1]
        if query is None:
            return rows.new_zeros(sequences, width, rows.shape[1])
        return torch.einsum("swr,skr->swk", query.view(sequences, width, -1).to(rows.dtype), rows)
