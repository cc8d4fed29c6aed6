"""Blocks of KV-cache slots, shared by common prefixes, and the table that maps a sequence's positions to them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import count

import torch

from jetspec.recurrent.states import EMPTY_STATE, RecurrentStates, StateWrite

#: What a full block holds: the id of the block content before it (0 at the start) and its own tokens.
Content = tuple[int, tuple[int, ...]]

#: Tokens of a K/V block where nothing else is asked for.
DEFAULT_KV_BLOCK_SIZE = 16


def blocks_needed(lengths: Iterable[int], max_num_seqs: int, rows: int = 1) -> int:
    """Blocks of the default size that hold a known set of requests; an engine sized by the machine takes far more.

    Args:
        lengths: tokens of each request, prompt and answer.
        max_num_seqs: requests that run at the same time; the longest ones are assumed to meet.
        rows: new rows of each in a forward.
    """
    longest = sorted(lengths, reverse=True)[:max_num_seqs]
    return sum(-(-(length + rows) // DEFAULT_KV_BLOCK_SIZE) + 1 for length in longest)


class BlockManager:
    """Hands out block ids `0 .. num_blocks - 1`, each standing for `block_size` consecutive cache slots.

    A full block whose K/V are final can be cached. A cached block is found again by its content, that is its tokens
    and all before them, and is shared between sequences. It keeps its content after it is freed, until it is handed
    out anew; the block that was unused for longest goes first.

    `states` holds the recurrent states of a model that has them. A sequence then owns one beside its blocks, and a
    cached prefix serves up to the last block that a snapshot of the state was taken behind.
    """

    def __init__(self, num_blocks: int, block_size: int, states: RecurrentStates | None = None) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.states = states
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._users = [0] * num_blocks
        # A content's id is never used twice, so content behind a block that is gone cannot be mistaken for another.
        self._content_ids = count(1)
        self._cached: dict[Content, tuple[int, int]] = {}  # content -> (block, content id)
        self._content_of: dict[int, Content] = {}

    @property
    def num_slots(self) -> int:
        """Tokens that all blocks hold together."""
        return self.num_blocks * self.block_size

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses."""
        return len(self._free)

    def blocks_needed(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` consecutive positions occupy."""
        return -(-num_tokens // self.block_size)

    def allocate(self, number: int) -> list[int]:
        """Take `number` blocks; the caller has checked `num_free`."""
        if number > len(self._free):
            raise RuntimeError(f"asked for {number} KV-cache blocks with {len(self._free)} free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(number)]
        for block in blocks:
            self._users[block] = 1
            content = self._content_of.pop(block, None)
            if content is not None:
                del self._cached[content]
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Give up one use of each block. Blocks that hold nothing findable are reused first."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block] == 0:
                self._free[block] = None
                if block not in self._content_of:
                    self._free.move_to_end(block, last=False)

    def cache_full_block(self, block: int, content: Content) -> int:
        """Make a full, final block findable; returns the id of its content, which may be in another block already."""
        found = self._cached.get(content)
        if found is not None:
            return found[1]
        content_id = next(self._content_ids)
        self._cached[content] = (block, content_id)
        self._content_of[block] = content
        return content_id

    def match(self, content: Content) -> tuple[int, int] | None:
        """Use the block with this content: (block, content id), or None if there is none."""
        found = self._cached.get(content)
        if found is not None:
            self._users[found[0]] += 1
            self._free.pop(found[0], None)
        return found


class BlockTable:
    """The blocks of one sequence: position `p` is slot `blocks[p // block_size] * block_size + p % block_size`."""

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self.blocks: list[int] = []
        self._content_ids: list[int] = []  # of the leading blocks that are cached
        self._slots: torch.Tensor | None = None
        #: Number of the sequence's recurrent state, if the model has such states. It gets one with its first tokens.
        self.state = EMPTY_STATE
        self._branches_at = 0  # tokens of the known prefix that the table could not start behind

    @property
    def capacity(self) -> int:
        """Positions the table has room for."""
        return len(self.blocks) * self._manager.block_size

    def growable_to(self) -> int:
        """Positions the table would have room for if it took every free block."""
        return self.capacity + self._manager.num_free * self._manager.block_size

    def reserve(self, num_tokens: int) -> None:
        """Grow to hold positions `0 .. num_tokens - 1`."""
        missing = self._manager.blocks_needed(num_tokens) - len(self.blocks)
        if missing > 0:
            self.blocks += self._manager.allocate(missing)
            self._slots = None

    def truncate(self, num_tokens: int) -> None:
        """Give back the blocks behind position `num_tokens - 1`."""
        keep = self._manager.blocks_needed(num_tokens)
        if keep < len(self.blocks):
            self._manager.free(self.blocks[keep:])
            del self.blocks[keep:]
            del self._content_ids[keep:]
            self._slots = None
        if not self.blocks and self.state != EMPTY_STATE:
            assert self._manager.states is not None
            self._manager.states.free(self.state)
            self.state = EMPTY_STATE

    def match_prefix(self, token_ids: Sequence[int]) -> int:
        """Start an empty table with the cached blocks of the longest prefix of `token_ids`; returns its length."""
        size = self._manager.block_size
        for start in range(0, len(token_ids) - size + 1, size):
            found = self._manager.match(self._content(token_ids, start))
            if found is None:
                break
            self.blocks.append(found[0])
            self._content_ids.append(found[1])
        self._slots = None
        if self._manager.states is not None:
            self._start_behind_snapshot(self._manager.states)
        return self.capacity

    def _start_behind_snapshot(self, states: RecurrentStates) -> None:
        """Keep the matched blocks up to the last one that a state is known behind, and start with that state."""
        self._branches_at = self.capacity
        snapshot = None
        while self.blocks and snapshot is None:
            snapshot = states.find_snapshot(self._content_ids[-1])
            if snapshot is None:
                self.truncate(self.capacity - self._manager.block_size)
        if snapshot is not None:
            self.state = states.allocate()
            states.copy(snapshot, self.state)

    def state_writes(self, source: int, rows: list[int], start: int) -> list[StateWrite]:
        """The states to write when `rows` of a forward, whose source was state `source`, fill positions from `start`.

        Beside the sequence's own these are snapshots: behind the last full block, and where the text leaves a prefix
        that it has in common with others. The full blocks must have been cached.
        """
        states, size, stop = self._manager.states, self._manager.block_size, start + len(rows)
        if states is None or not rows:
            return []
        writes = []
        for length in sorted({self._branches_at, stop // size * size}):
            if start < length <= stop:
                number = states.new_snapshot(self._content_ids[length // size - 1])
                writes += [] if number is None else [StateWrite(source, rows[: length - start], number)]
        if self.state == EMPTY_STATE:
            self.state = states.allocate()
        return [*writes, StateWrite(source, rows, self.state)]

    def cache_full_blocks(self, token_ids: Sequence[int], num_final: int) -> None:
        """Make the blocks that `num_final` tokens with final K/V fill findable by other sequences."""
        size = self._manager.block_size
        for start in range(len(self._content_ids) * size, num_final - size + 1, size):
            content_id = self._manager.cache_full_block(self.blocks[start // size], self._content(token_ids, start))
            self._content_ids.append(content_id)

    def _content(self, token_ids: Sequence[int], start: int) -> Content:
        before = self._content_ids[-1] if self._content_ids else 0
        return before, tuple(token_ids[start : start + self._manager.block_size])

    def slots(self, start: int, stop: int) -> torch.Tensor:
        """Cache slots of positions `start .. stop - 1`, int64 on the CPU."""
        if self._slots is None:
            size = self._manager.block_size
            starts = torch.tensor(self.blocks, dtype=torch.int64) * size
            self._slots = (starts[:, None] + torch.arange(size)).flatten()
        return self._slots[start:stop]
