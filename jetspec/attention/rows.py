"""Rows: the one batch type. A prompt chunk is a chain of rows, plain decoding one row, a draft a tree of rows.

Shapes:
    rows         new tokens of the batch, all sequences end to end; n of them in one segment
    context_len  committed tokens of a segment's sequence
    keys         what a segment's rows may attend to: its context, then its n rows
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from jetspec.errors import JetSpecError
from jetspec.tree.mask import ancestor_mask, chain_parents

SlotIndex = slice | Tensor


@dataclass(frozen=True)
class Chunks:
    """Attention in chunks of positions: a row sees back to the first position of its own chunk of `size`."""

    size: int


#: How far back a row sees: over this many keys, its own included, or in its chunk; None: over all of them.
Window = int | Chunks | None
Positions = TypeVar("Positions", int, Tensor)


def first_visible(window: int | Chunks, positions: Positions) -> Positions:
    """The first position that rows at these positions see; negative where they see all."""
    return positions - (positions % window.size if isinstance(window, Chunks) else window - 1)


@dataclass(frozen=True)
class Segment:
    """The new rows of one sequence: rows ``start`` to ``stop`` of the batch.

    ``context_len`` committed tokens (positions 0 to ``context_len - 1``) are seen by every row.
    ``slots`` [context_len + stop - start] int64 are the pool slots of the context, then of the new rows.
    ``state`` is the number of the sequence's recurrent state; 0 is the state before the first token.
    """

    start: int
    stop: int
    context_len: int
    slots: Tensor
    state: int = 0

    @property
    def num_rows(self) -> int:
        """New rows of the sequence."""
        return self.stop - self.start


class SegmentPlan(NamedTuple):
    """What attention needs for one segment, the same in every layer of one window size."""

    keys: SlotIndex  # pool slots of the keys, in order
    bias: Tensor | None  # [num_rows, num_keys] added to the scores; None where every row sees every key


@dataclass
class RowBatch:
    """New rows of several sequences, flat: the rows of one sequence lie consecutively.

    A batch is checked once, when it is made; make it on the CPU, where that waits for nothing.

    Attributes:
        token_ids: [rows] int64.
        positions: [rows] int64, absolute in the row's sequence.
        parents: [rows] int64 on the CPU, the parent's index within the segment, or -1 where the parent is the committed
            prefix. A parent comes before its children.
        segments: the rows of each sequence.
        id_range: the smallest and the largest of the token ids.
        max_position: the largest of the positions; -1 without rows.

    Raises:
        JetSpecError: these do not fit together.
    """

    token_ids: Tensor
    positions: Tensor
    parents: Tensor
    segments: list[Segment]
    id_range: tuple[int, int] = field(default=(0, 0), init=False, repr=False)
    max_position: int = field(default=-1, init=False, repr=False)
    _cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def chains(
        cls, tokens: Sequence[Sequence[int] | Tensor], slots: Sequence[Tensor], states: Sequence[int] | None = None
    ) -> RowBatch:
        """The new tokens of each sequence, one after another, behind what it has committed.

        tokens[s] are n new ones; slots[s] [context_len + n] are as in `Segment` and so tell how many were committed.
        states[s] is the number of the recurrent state, for models that have them.
        """
        ends = list(accumulate(map(len, tokens)))
        starts = [0, *ends[:-1]]
        counts = [len(own) - len(new) for own, new in zip(slots, tokens, strict=True)]
        return cls(
            token_ids=torch.cat([torch.as_tensor(new) for new in tokens]),
            positions=torch.cat([torch.arange(count, len(own)) for count, own in zip(counts, slots)]),
            parents=torch.cat([torch.arange(-1, len(new) - 1) for new in tokens]),
            segments=[Segment(*segment) for segment in zip(starts, ends, counts, slots, states or [0] * len(slots))],
        )

    def __post_init__(self) -> None:
        self.parents = self.parents.cpu()
        check_rows(self)
        if len(self):
            self.id_range = int(self.token_ids.min()), int(self.token_ids.max())
            self.max_position = int(self.positions.max())

    def __len__(self) -> int:
        return self.token_ids.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the ids lie."""
        return self.token_ids.device

    def to(self, device: torch.device | str) -> RowBatch:
        """The same rows with ids and positions on `device`; slots stay where they are until they are indexed with."""
        if self.device == torch.device(device) == self.positions.device:
            return self
        moved = copy(self)
        moved.token_ids, moved.positions = self.token_ids.to(device), self.positions.to(device)
        moved._cache = {}
        return moved

    @property
    def slot_mapping(self) -> Tensor:
        """[rows] int64: the pool slot each row's K/V is written to."""
        if "slot_mapping" not in self._cache:
            new_slots = [segment.slots[segment.context_len :] for segment in self.segments]
            self._cache["slot_mapping"] = torch.cat(new_slots).to(self.device)
        mapping: Tensor = self._cache["slot_mapping"]
        return mapping

    def mask(self, segment_index: int, window: Window = None) -> Tensor:
        """Bool [n, context_len + n], True where a row may attend: the context, its ancestors and itself.

        With a sliding window w, a row at position p sees only key positions greater than p - w; with chunks, those of
        its own chunk.
        """
        key = ("mask", segment_index, window)
        if key not in self._cache:
            self._cache[key] = self._build_mask(self.segments[segment_index], window)
        mask: Tensor = self._cache[key]
        return mask

    def plan(self, segment_index: int, window: Window, dtype: torch.dtype) -> SegmentPlan:
        """Key slots and additive mask of one segment, built once per forward and shared by all layers."""
        key = ("plan", segment_index, window, dtype)
        if key not in self._cache:
            self._cache[key] = self._build_plan(segment_index, window, dtype)
        plan: SegmentPlan = self._cache[key]
        return plan

    def _build_mask(self, segment: Segment, window: Window) -> Tensor:
        n, context_len = segment.num_rows, segment.context_len
        ancestors = visibility(self.parents[segment.start : segment.stop])
        context = torch.ones(n, context_len, dtype=torch.bool)
        mask = torch.cat([context, ancestors], dim=1).to(self.device)
        if window is None:
            return mask
        rows = self.positions[segment.start : segment.stop]
        keys = torch.cat([torch.arange(context_len, device=self.device), rows])
        return mask & (keys[None, :] >= first_visible(window, rows)[:, None])

    def _build_plan(self, segment_index: int, window: Window, dtype: torch.dtype) -> SegmentPlan:
        segment = self.segments[segment_index]
        total = segment.context_len + segment.num_rows
        if window is not None and (window.size if isinstance(window, Chunks) else window) >= total:
            return self.plan(segment_index, None, dtype)
        # A row's position is at least context_len, so no row sees a key that a row there would not see.
        first = 0 if window is None else max(0, first_visible(window, segment.context_len))
        keys = slot_index(segment.slots[first:], self.device)
        if segment.num_rows == 1:
            return SegmentPlan(keys, None)
        visible = self.mask(segment_index, window)[:, first:]
        bias = torch.zeros(visible.shape, dtype=dtype, device=self.device)
        return SegmentPlan(keys, bias.masked_fill_(~visible, float("-inf")))


def visibility(parents: Tensor) -> Tensor:
    """Bool [n, n]: row i sees row j where j is i or an ancestor of i; a chain (a prompt chunk) takes a short cut."""
    n = parents.shape[0]
    if torch.equal(parents, chain_parents(n)):
        return torch.ones(n, n, dtype=torch.bool).tril_()
    return ancestor_mask(parents)


def slot_index(slots: Tensor, device: torch.device) -> SlotIndex:
    """A slice where the slots are one increasing run (read as a view, no copy), else the slots on `device`.

    Slots already on an accelerator are not inspected: that would wait for it.
    """
    n = slots.shape[0]
    if slots.device.type == "cpu" and n:
        first = int(slots[0])
        if int(slots[-1]) - first == n - 1 and torch.equal(slots, torch.arange(first, first + n)):
            return slice(first, first + n)
    return slots.to(device)


def check_rows(batch: RowBatch) -> None:
    """Raise JetSpecError unless ids, positions, parents, segments and slots fit together."""
    rows = batch.token_ids.shape[0]
    for name in ("token_ids", "positions", "parents"):
        tensor = getattr(batch, name)
        if tensor.dtype != torch.int64 or tensor.shape != (rows,):
            raise JetSpecError(f"RowBatch.{name} must be int64 [{rows}], not {tensor.dtype} {list(tensor.shape)}")
    expected_start = 0
    for index, segment in enumerate(batch.segments):
        if segment.start != expected_start or segment.stop <= segment.start:
            raise JetSpecError(f"RowBatch.segments[{index}] must start at row {expected_start} and hold a row or more")
        keys = segment.context_len + segment.num_rows
        if segment.context_len < 0 or segment.slots.shape != (keys,):
            raise JetSpecError(f"RowBatch.segments[{index}].slots must hold context_len + rows = {keys} slots")
        expected_start = segment.stop
    if expected_start != rows:
        raise JetSpecError(f"RowBatch.segments cover {expected_start} of {rows} rows; they must cover all of them")
    starts = torch.tensor([segment.start for segment in batch.segments], dtype=torch.int64)
    sizes = torch.tensor([segment.num_rows for segment in batch.segments], dtype=torch.int64)
    index_in_segment = torch.arange(rows) - starts.repeat_interleave(sizes)
    if bool(((batch.parents >= index_in_segment) | (batch.parents < -1)).any()):
        raise JetSpecError("RowBatch.parents must be -1 or the index of an earlier row of the same segment")
