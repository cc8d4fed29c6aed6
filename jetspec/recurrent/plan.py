"""Which rows a recurrence computes together: pieces of sequences, padded to groups of one length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from jetspec.tree.mask import ancestor_mask, chain_parents

#: Rows of a chain that are computed at once; a longer chain is a run of pieces, each behind the state of the last.
PIECE_ROWS = 64


class Group(NamedTuple):
    """Pieces of one padded length. Behind its own rows, a piece repeats its first one."""

    rows: Tensor  # [s, n] int64, rows of the batch
    is_real: Tensor  # [s, n] bool, False where a row is padding
    visible: Tensor  # [s, n, n] bool, ancestors of a row within the piece, and itself
    segments: Tensor  # [s] int64, whose rows they are
    has_next: bool  # whether a later step continues one of these pieces


class RowPlan:
    """How the rows of a forward are computed, the same for all recurrent layers.

    Args:
        parents: [rows] int64 on the CPU, the parent's index within the segment, or -1.
        segments: (first row, row behind the last) of each sequence; parents come before their children.
        device: where the tensors of the plan lie.
    """

    def __init__(self, parents: Tensor, segments: Sequence[tuple[int, int]], device: torch.device) -> None:
        self.parents, self.segments, self.device = parents, segments, device
        self.steps = self._steps()
        self._taps: dict[int, Tensor] = {}

    def _steps(self) -> list[list[Group]]:
        steps: dict[int, list[tuple[int, int, int, bool]]] = defaultdict(list)
        for index, (start, stop) in enumerate(self.segments):
            rows = stop - start
            size = PIECE_ROWS if _is_chain(self.parents[start:stop]) else rows
            for step, first in enumerate(range(start, stop, size)):
                last = min(first + size, stop)
                steps[step].append((index, first, last, last < stop))
        return [self._groups(steps[step]) for step in sorted(steps)]

    def _groups(self, pieces: list[tuple[int, int, int, bool]]) -> list[Group]:
        by_length: dict[tuple[int, bool], list[tuple[int, int, int]]] = defaultdict(list)
        for index, first, last, has_next in pieces:
            by_length[padded_length(last - first), has_next].append((index, first, last))
        groups = []
        for (length, has_next), own in by_length.items():
            visible = torch.stack([self._visible(*piece, length) for piece in own])
            rows, is_real = padded([list(range(first, last)) for _, first, last in own], length)
            segments = torch.tensor([index for index, _, _ in own])
            rows, is_real, visible, segments = (x.to(self.device) for x in (rows, is_real, visible, segments))
            groups.append(Group(rows, is_real, visible, segments, has_next))
        return groups

    def _visible(self, segment: int, first: int, last: int, length: int) -> Tensor:
        rows = last - first
        parents = self.parents[first:last] - (first - self.segments[segment][0])
        own = torch.ones(rows, rows, dtype=torch.bool).tril() if _is_chain(parents) else ancestor_mask(parents)
        visible = torch.eye(length, dtype=torch.bool)
        visible[:rows, :rows] = own
        return visible

    def taps(self, width: int) -> Tensor:
        """Where the inputs of a convolution over `width` tokens lie: [rows, width] int64, the row itself last.

        The numbers count the committed columns of all segments, width - 1 of each, oldest first, then the rows.
        """
        if width not in self._taps:
            past = width - 1
            before = len(self.segments) * past
            taps = torch.empty(len(self.parents), width, dtype=torch.int64)
            for index, (start, stop) in enumerate(self.segments):
                columns = torch.arange(index * past, (index + 1) * past)
                taps[start:stop] = _segment_taps(self.parents[start:stop], columns, before + start)
            self._taps[width] = taps.to(self.device)
        return self._taps[width]


def _segment_taps(parents: Tensor, columns: Tensor, first: int) -> Tensor:
    """Taps [rows, past + 1] of one segment: columns [past] are before its rows, which have the numbers from `first`."""
    if _is_chain(parents):
        numbers = torch.cat([columns, torch.arange(first, first + len(parents))])
        return numbers.unfold(0, len(columns) + 1, 1)
    before = [-1, *columns.tolist()]
    taps: list[list[int]] = []
    for row, parent in enumerate(parents.tolist()):
        taps.append([*(before if parent < 0 else taps[parent])[1:], first + row])
    return torch.tensor(taps)


def _is_chain(parents: Tensor) -> bool:
    return torch.equal(parents, chain_parents(len(parents)))


def padded_length(rows: int) -> int:
    """The power of two that holds so many rows."""
    return 1 << (rows - 1).bit_length()


def padded(lists: Sequence[Sequence[int]], length: int) -> tuple[Tensor, Tensor]:
    """Lists of row numbers, none empty, as [lists, length] int64, and bool where a number is no padding."""
    rows = torch.tensor([[*own, *[own[0]] * (length - len(own))] for own in lists])
    counts = torch.tensor([len(own) for own in lists])
    return rows, torch.arange(length) < counts[:, None]
