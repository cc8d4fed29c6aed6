"""What one round carries from scheduling to learning: the sequences' rows, the choice of nodes, the times."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from jetspec.attention import RowBatch, Segment
from jetspec.clock import Clock
from jetspec.engine.sequence import Sequence
from jetspec.models.target import TargetOutput
from jetspec.tree import Forest, Walk
from jetspec.tree.calibration import Nodes


@dataclass(eq=False)
class ScheduledSequence:
    """One sequence's rows in a round: `num_known` known tokens as a chain, then a tree whose root follows them.

    A prompt chunk that is not the last has no tree. The last one has a root alone, its last token. A decoding sequence
    has a tree alone, whose root is the newest token. `token_ids`, `parents` and `positions` describe all rows; a parent
    is the index of another row of this sequence, or -1.
    """

    sequence: Sequence
    #: Rows it may have: the length of a prompt chunk, or the largest tree, root included.
    granted_rows: int
    #: Committed tokens before the round.
    context_len: int
    #: Whether the rows decode (a verify forward or one plain step) rather than fill in a prompt.
    decodes: bool
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    num_known: int = 0
    #: Path log probabilities of the tree's rows.
    log_probs: list[float] = field(default_factory=list)
    #: Index of the tree's root among the rows of logits.
    logits_start: int = 0
    #: The accepted path; None where there is no tree or the request failed.
    walk: Walk | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def drafts(self) -> bool:
        """Whether the tree may have more than its root."""
        return self.decodes and self.granted_rows > 1

    @property
    def has_tree(self) -> bool:
        """Whether a row chooses a token."""
        return self.num_known < len(self)

    @property
    def scores_prompt(self) -> bool:
        """Whether the rows before the root need logits, too."""
        return self.sequence.params.prompt_logprobs is not None and self.context_len < len(self.sequence.prompt_ids)

    @property
    def kept_rows(self) -> list[int]:
        """Rows whose K/V become final: the known ones and those of the walk."""
        return [*range(self.num_known), *(self.num_known + row for row in (self.walk.rows if self.walk else []))]

    def set_chain(self) -> None:
        """Known tokens as rows: a prompt chunk, or the lone root of plain decoding."""
        stop = self.context_len + (1 if self.decodes else self.granted_rows)
        self.token_ids = self.sequence.token_ids[self.context_len : stop]
        self.parents = list(range(-1, len(self) - 1))
        self.positions = list(range(self.context_len, stop))
        reaches_end = stop == len(self.sequence.token_ids)
        self.num_known = len(self) - reaches_end
        self.log_probs = [0.0] * reaches_end

    def set_tree(self, forest: Forest, index: int) -> None:
        """Tree `index` of a forest as rows."""
        rows = forest.rows(index)
        self.token_ids, self.parents = forest.tokens[rows].tolist(), forest.parents[rows].tolist()
        self.positions = (forest.depths[rows] + self.context_len).tolist()
        self.log_probs = forest.log_probs[rows].tolist()


@dataclass(frozen=True)
class Allocation:
    """Rows that the tree of each of `sequences` may have, root included (1: no draft), and what runs beside them.

    A budget gives it for all decoding sequences; `granted` then narrows it to those that draft.
    """

    sequences: list[Sequence]
    rows: list[int]
    #: Whether this draft is made to see if drafting pays again.
    is_trial: bool = False
    #: Rows of the round beside the trees, row-key pairs that these attend to, and tokens that they yield.
    other_rows: int = 0
    other_keys: int = 0
    other_tokens: int = 0

    def granted(self, scheduled: Seq[ScheduledSequence]) -> Allocation:
        """The allocation of the round as it was scheduled: fewer rows where room was short."""
        drafted = [s for s in scheduled if s.drafts]
        others = [s for s in scheduled if not s.drafts]
        rows = [1 if s.decodes else s.granted_rows for s in others]
        yielding = [s.decodes or s.context_len + s.granted_rows == len(s.sequence.token_ids) for s in others]
        return replace(
            self,
            sequences=[s.sequence for s in drafted],
            rows=[s.granted_rows for s in drafted],
            other_rows=sum(rows),
            other_keys=sum(s.context_len * n for s, n in zip(others, rows, strict=True)),
            other_tokens=sum(yielding),
        )


@dataclass(frozen=True)
class Selection:
    """The trees that a round verifies, and what the budget expects of it (None where it does not ask)."""

    forest: Forest
    nodes: Nodes | None = None
    #: Per tree, the path probabilities of the proposed nodes in falling order, kept or not.
    proposed: list[np.ndarray] = field(default_factory=list)
    #: Per tree, whether it reaches the depth at which its request has to end.
    reached_limit: list[bool] = field(default_factory=list)
    expected_tokens: float | None = None
    expected_seconds: float | None = None


@dataclass(eq=False)
class Round:
    """One round over all scheduled sequences; every stage of `Engine.step` adds what it finds."""

    scheduled: list[ScheduledSequence]
    allocation: Allocation
    clock: Clock
    selection: Selection | None = None
    #: All rows, end to end, on the target's device.
    batch: RowBatch | None = None
    output: TargetOutput | None = None
    #: The most probable token of every row of logits, -1 where the row is not finite.
    choices: list[int] = field(default_factory=list)
    #: Seconds by stage, once the round is over.
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def drafted(self) -> list[ScheduledSequence]:
        """The sequences that a draft was made for, in the order of the selection's trees."""
        return [s for s in self.scheduled if s.drafts]

    @property
    def rows(self) -> int:
        """Rows of the target's forward."""
        return sum(map(len, self.scheduled))

    @property
    def keys(self) -> int:
        """Pairs of a row and a committed token that it attends to."""
        return sum(len(s) * s.context_len for s in self.scheduled)

    @property
    def total_s(self) -> float:
        """Seconds of the whole round."""
        return sum(self.seconds.values())


def batch_of(scheduled: Seq[ScheduledSequence]) -> RowBatch:
    """All rows, end to end, on the CPU."""
    segments: list[Segment] = []
    row = 0
    for one in scheduled:
        slots = one.sequence.table.slots(0, one.context_len + len(one))
        segments.append(Segment(row, row + len(one), one.context_len, slots, one.sequence.table.state))
        row += len(one)
    return RowBatch(
        token_ids=torch.tensor([token for s in scheduled for token in s.token_ids]),
        positions=torch.tensor([position for s in scheduled for position in s.positions]),
        parents=torch.tensor([parent for s in scheduled for parent in s.parents]),
        segments=segments,
    )
