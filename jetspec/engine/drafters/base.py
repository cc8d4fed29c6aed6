"""What a drafter is: anything that can propose the trees that the target verifies."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from jetspec.engine.sequence import Sequence
from jetspec.errors import JetSpecError
from jetspec.head import DraftHead
from jetspec.models.onednn_linear import pack_linears
from jetspec.models.target import Target
from jetspec.tree import Expand, Forest, grow_trees, top_candidates

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CommittedRows:
    """Newly committed tokens of all sequences, end to end.

    Span (sequence, start, stop) stands for the positions `start .. stop - 1` of one sequence. positions and slots are
    [n] int64 on the target's device; aux_hidden_states [n, aux_layers * hidden], None where the drafter reads no layer.
    """

    spans: list[tuple[Sequence, int, int]]
    positions: Tensor
    slots: Tensor
    aux_hidden_states: Tensor | None


class Drafter(ABC):
    """Proposes draft trees. A drafter may be wrong, never harmful: the target decides every token.

    The probabilities it gives are corrected by what is really accepted where the tree budget is "auto", so they need
    not be right either, only ordered.
    """

    #: Target layers whose outputs `extend` is given; empty if it needs none.
    target_layer_ids: tuple[int, ...] = ()
    #: Bytes that one token takes in storage addressed by the engine's cache slots.
    cache_bytes_per_token: int = 0
    _prepared: bool = False
    _warned: bool = False

    def prepare(self, target: Target, num_blocks: int, block_size: int) -> None:
        """Called once, by the engine the drafter is given to, before anything else.

        Args:
            target: the engine's target.
            num_blocks: K/V blocks of the engine.
            block_size: tokens of a K/V block.

        Raises:
            JetSpecError: the drafter does not fit the target, or belongs to another engine, whose sequences it knows.
        """
        del target, num_blocks, block_size
        if self._prepared:
            raise JetSpecError(
                f"draft: this {type(self).__name__} belongs to another engine; make a new one (its head or model may "
                "be shared)"
            )
        self._prepared = True

    def extend(self, rows: CommittedRows) -> None:  # noqa: B027 - a drafter need not keep anything
        """Learn newly committed tokens. A token of a shared prefix is committed once, for all who share its slot."""

    @abstractmethod
    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> Forest:
        """One tree a sequence, rooted at its newest token, of at most `budgets` rows and `max_depth` levels.

        An exception, and trees of another kind, end the engine's round with a JetSpecError that names the drafter.
        """

    def warn_not_finite(self, what: str) -> None:
        """Log once that there is no draft because scores are not finite."""
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s gives NaN or infinite logits: nothing is drafted from them; check weights and dtype", what
            )


class HeadDrafter(Drafter):
    """Trees of the most probable nodes under a draft head's scores; a subclass says how nodes get their children.

    Args:
        head: the draft head.
        chain: draft the most probable path only.
        window: committed tokens the head looks back on; None: all. Bounds the time a draft takes in long contexts.

    Raises:
        JetSpecError: window is below 1.
    """

    #: Whether children are made level by level, so that a node which cannot be in the tree is better not expanded.
    by_level = False

    def __init__(self, head: DraftHead, *, chain: bool = False, window: int | None = None) -> None:
        if window is not None and window < 1:
            raise JetSpecError(f"window={window}: must be at least 1 token; use None for the whole context")
        self.head, self.chain, self.window = head, chain, window
        self.target_layer_ids = head.config.target_layer_ids
        self.cache_bytes_per_token = head.cache_bytes_per_token
        self.target: Target

    def prepare(self, target: Target, num_blocks: int, block_size: int) -> None:
        """Check that the head fits the target, and make room for what it keeps of committed tokens."""
        super().prepare(target, num_blocks, block_size)
        self.head.validate_for(target)
        self.target_layer_ids = self.head.config.layer_ids(target.num_layers)
        self.head.share_weights(target)
        pack_linears(self.head)
        self.target = target
        self.cache = self.head.new_cache(num_blocks, block_size)
        #: Ids that both the head and the target know; either may have padded its vocabulary.
        self.vocab_size = min(self.head.config.vocab_size, target.num_embeddings)

    @abstractmethod
    def children(self, anchors: Tensor, sequences: Seq[Sequence], limit: int) -> Expand:
        """What `grow_trees` expands the trees of `sequences` by, with at most `limit` children a node; anchors [S]."""

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> Forest:
        """The most probable nodes under the head's scores."""
        anchors = torch.tensor([s.anchor for s in sequences], device=self.head.device)
        limits = [s.max_depth for s in sequences]
        expand = self.children(anchors, sequences, 1 if self.chain else max(budgets))
        forest = grow_trees(anchors, expand, self.head.config.block_size - 1, budgets, limits, narrow=self.by_level)
        # A node of a finite score has a child that is not impossible.
        sizes = [stop - start for start, stop in zip(forest.offsets[:-1], forest.offsets[1:], strict=True)]
        if any(size == 1 < min(b, 1 + d) for size, b, d in zip(sizes, budgets, limits, strict=True)):
            self.warn_not_finite("the draft head")
        return forest

    def logits(self, hidden: Tensor, sequences: Seq[Sequence]) -> Tensor:
        """float32 logits [S, .., V] of the head's output hidden [S, .., hidden] at the sequences' temperatures."""
        return tempered(self.head.logits(hidden, self.target)[..., : self.vocab_size].float(), sequences)

    def candidates(self, logits: Tensor, limit: int) -> tuple[Tensor, Tensor]:
        """The most probable tokens of logits [.., V]: log probabilities and the target's ids, both [.., limit]."""
        log_probs, ids = top_candidates(logits, limit)
        return log_probs, self.head.target_ids(ids)

    def first_seen(self, position: int) -> int:
        """The first position that the head sees from `position` on."""
        return 0 if self.window is None else max(0, position - self.window)


def tempered(logits: Tensor, sequences: Seq[Sequence]) -> Tensor:
    """Logits [S, .., V] at the temperature of each sequence: likely paths are those of its tempered distribution."""
    scale = temperatures(sequences)
    if bool((scale == 1).all()):
        return logits
    return logits / scale.to(logits.device).view(-1, *[1] * (logits.dim() - 1))


def temperatures(sequences: Seq[Sequence]) -> Tensor:
    """[S]: what a draft's logits are divided by. Greedy ones keep theirs: their distribution has but one token."""
    return torch.tensor([1.0 if s.params.greedy else s.params.temperature for s in sequences])
