"""Storage of committed states: one of fixed size for every sequence, and snapshots of a few prefixes."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from jetspec.recurrent.convolution import columns_after
from jetspec.recurrent.linear import Updates, state_after
from jetspec.recurrent.plan import padded, padded_length

#: The state before the first token. It is never written.
EMPTY_STATE = 0


class StateShape(NamedTuple):
    """The state of one operation: [past, channels] of a convolution, or [heads, dk, dv] of a recurrence."""

    size: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one state."""
        return int(torch.Size(self.size).numel()) * self.dtype.itemsize


class StateWrite(NamedTuple):
    """State `destination` becomes the state `source` behind these rows of the last forward, a path in order."""

    source: int
    rows: list[int]
    destination: int


class RecurrentStates:
    """Committed states of sequences, by number, and the rows that the last forward may add to them.

    Number 0 is the state before the first token. A forward reads states and never writes them, so rows that are
    rejected or cancelled leave nothing.

    Args:
        shapes: of each operation with a state, in the order in which a forward reaches them.
        num_sequences: states that sequences may hold at the same time.
        num_snapshots: states that are kept to start other sequences with, the least recently used of them is replaced.
        device: where the states lie.
    """

    def __init__(
        self, shapes: Sequence[StateShape], num_sequences: int, num_snapshots: int, device: torch.device
    ) -> None:
        self.shapes = list(shapes)
        total = 1 + num_sequences + num_snapshots
        self.pools = [torch.zeros(total, *shape.size, dtype=shape.dtype, device=device) for shape in shapes]
        #: What the last forward left for each operation: the inputs of a convolution, or the updates of a recurrence.
        self.rows: list[Tensor | Updates | None] = [None] * len(self.shapes)
        self._free = list(range(num_sequences, 0, -1))
        self._free_snapshots = list(range(total - 1, num_sequences, -1))
        self._snapshots: OrderedDict[int, int] = OrderedDict()  # content id -> number

    @property
    def num_free(self) -> int:
        """Sequences that may still take a state."""
        return len(self._free)

    def allocate(self) -> int:
        """A number for a sequence's state, which holds anything until it is written."""
        if not self._free:
            raise RuntimeError("asked for a recurrent state with none free")
        return self._free.pop()

    def free(self, number: int) -> None:
        """Give a sequence's state back."""
        self._free.append(number)

    def find_snapshot(self, content_id: int) -> int | None:
        """The number of the state behind a block content; None where there is none."""
        number = self._snapshots.get(content_id)
        if number is not None:
            self._snapshots.move_to_end(content_id)
        return number

    def new_snapshot(self, content_id: int) -> int | None:
        """A number to write the state behind a block content to; None where there is one already, or no room at all."""
        if content_id in self._snapshots:
            self._snapshots.move_to_end(content_id)
            return None
        if not self._free_snapshots:
            if not self._snapshots:
                return None
            self._free_snapshots.append(self._snapshots.popitem(last=False)[1])
        number = self._snapshots[content_id] = self._free_snapshots.pop()
        return number

    def copy(self, source: int, destination: int) -> None:
        """Make one state another's copy."""
        for pool in self.pools:
            pool[destination] = pool[source]

    def commit(self, writes: Sequence[StateWrite]) -> None:
        """Write states behind rows of the last forward. All are read before any is written; the last write counts."""
        groups: dict[int, list[StateWrite]] = defaultdict(list)
        for write in {write.destination: write for write in writes}.values():
            groups[padded_length(len(write.rows))].append(write)
        device = self.pools[0].device
        plans = []
        for length, own in groups.items():
            rows, is_real = padded([write.rows for write in own], length)
            numbers = torch.tensor([[write.source, write.destination] for write in own])
            plans.append((rows.to(device), is_real.to(device), *numbers.to(device).unbind(1)))
        for pool, kept in zip(self.pools, self.rows, strict=True):
            assert kept is not None, "states are committed once, after a forward"
            states = []
            for rows, is_real, sources, _ in plans:
                before = pool[sources]
                if isinstance(kept, Updates):
                    states.append(state_after(kept, before, rows, is_real))
                else:
                    states.append(columns_after(kept, before, rows, is_real.sum(1)))
            for (_, _, _, destinations), state in zip(plans, states, strict=True):
                pool[destinations] = state
        self.rows = [None] * len(self.shapes)
