"""Drafting with a draft head of any kind: trees of the most probable nodes under its scores."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, Protocol

import torch
from torch import Tensor

from jetspec.engine.drafters.autoregressive import AutoregressiveContext
from jetspec.engine.drafters.base import CommittedRows, Drafter
from jetspec.engine.drafters.moment import Moment
from jetspec.engine.drafters.parallel import ParallelContext
from jetspec.engine.sequence import Sequence
from jetspec.errors import JetSpecError
from jetspec.head import DraftHead
from jetspec.models.onednn_linear import pack_linears
from jetspec.models.target import Target
from jetspec.tree import Expand, Forest, grow_trees


class Context(Protocol):
    """What a kind of head keeps of committed tokens, in the slots that the target's block tables address."""

    #: Whether children are made level by level, so that a node which cannot be in the tree is better not expanded.
    by_level: bool

    def extend(self, rows: CommittedRows) -> None:
        """Learn newly committed tokens."""

    def children(self, anchors: torch.Tensor, sequences: Seq[Sequence], limit: int) -> Expand:
        """What `grow_trees` expands the trees of `sequences` by, with at most `limit` children a node."""


#: By the `method` of a head's configuration.
CONTEXTS: dict[str, Any] = {"parallel": ParallelContext, "autoregressive": AutoregressiveContext}


class HeadDrafter(Drafter):
    """Trees from a draft head. Its kind decides how nodes get their children, and nothing else.

    Args:
        head: the draft head.
        chain: draft the most probable path only.
        window: committed tokens the head looks back on; None: all. Bounds the time a draft takes in long contexts.

    Raises:
        JetSpecError: window is below 1.
    """

    def __init__(self, head: DraftHead, *, chain: bool = False, window: int | None = None) -> None:
        if window is not None and window < 1:
            raise JetSpecError(f"window={window}: must be at least 1 token; use None for the whole context")
        self.head = head
        self.chain = chain
        self.window = window
        self.target_layer_ids = head.config.target_layer_ids
        self.cache_bytes_per_token = head.cache_bytes_per_token
        self.context: Context

    def prepare(self, target: Target, num_blocks: int, block_size: int) -> None:
        self.head.validate_for(target)
        pack_linears(self.head)
        self.context = CONTEXTS[self.head.config.kind](self.head, target, num_blocks, block_size, self.window)

    def extend(self, rows: CommittedRows) -> None:
        self.context.extend(rows)

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> Forest:
        anchors = torch.tensor([s.anchor for s in sequences], device=self.head.device)
        expand = self.context.children(anchors, sequences, 1 if self.chain else max(budgets))
        depth, limits = self.head.config.block_size - 1, [s.max_depth for s in sequences]
        start = Moment(anchors.device)
        expansions: list[tuple[Moment, Moment]] = []

        def timed_expand(depth: int, tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
            before = Moment(anchors.device)
            children = expand(depth, tokens, parents)
            expansions.append((before, Moment(anchors.device)))
            return children

        forest = grow_trees(anchors, timed_expand, depth, budgets, limits, narrow=self.context.by_level)
        self.tree_s = Moment(anchors.device).since(start) - sum(end.since(begin) for begin, end in expansions)
        return forest
