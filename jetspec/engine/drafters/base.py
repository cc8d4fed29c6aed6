"""What a drafter is: anything that can propose the trees that the target verifies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from jetspec.engine.sequence import Sequence
from jetspec.errors import JetSpecError
from jetspec.models.target import Target
from jetspec.tree import Forest


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
    #: Seconds of the last `propose` in which trees were built of scores, where the drafter tells them apart.
    tree_s: float = 0.0
    _taken: bool = False

    def take(self) -> None:
        """Mark the drafter as some engine's own. JetSpecError if it is one's already: it knows that one's sequences."""
        if self._taken:
            raise JetSpecError(
                f"draft: this {type(self).__name__} belongs to another engine; make a new one (its head or model may "
                "be shared)"
            )
        self._taken = True

    def prepare(self, target: Target, num_blocks: int, block_size: int) -> None:
        """Called once, by the engine the drafter is given to, before anything else.

        Raises JetSpecError where the drafter does not fit the target.
        """
        return

    def extend(self, rows: CommittedRows) -> None:
        """Learn newly committed tokens. A token of a shared prefix is committed once, for all who share its slot."""
        return

    @abstractmethod
    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> Forest:
        """One tree a sequence, rooted at its newest token, of at most `budgets` rows and `max_depth` levels.

        An exception, and trees of another kind, end the engine's round with a JetSpecError that names the drafter.
        """
