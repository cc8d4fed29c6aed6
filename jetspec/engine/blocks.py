"""Blocks of KV-cache slots and the table that maps a sequence's positions to them."""

from __future__ import annotations

import torch


class BlockManager:
    """Hands out block ids `0 .. num_blocks - 1`, each standing for `block_size` consecutive cache slots."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` consecutive positions occupy."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks; the caller has checked `num_free`."""
        if count > len(self._free):
            raise RuntimeError(f"asked for {count} KV-cache blocks with {len(self._free)} free")
        return [self._free.pop() for _ in range(count)]

    def free(self, blocks: list[int]) -> None:
        self._free.extend(reversed(blocks))


class BlockTable:
    """The blocks of one sequence: position `p` lives in slot `blocks[p // block_size] * block_size + p % block_size`."""

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self.blocks: list[int] = []
        self._slots: torch.Tensor | None = None

    @property
    def capacity(self) -> int:
        """Positions the table has room for."""
        return len(self.blocks) * self._manager.block_size

    def growable_to(self) -> int:
        """Positions the table would have room for if it took every free block."""
        return self.capacity + self._manager.num_free * self._manager.block_size

    def reserve(self, num_tokens: int) -> None:
        """Grow to hold positions `0 .. num_tokens - 1`."""
        missing = self._manager.blocks_for(num_tokens) - len(self.blocks)
        if missing > 0:
            self.blocks += self._manager.allocate(missing)
            self._slots = None

    def trim(self, num_tokens: int) -> None:
        """Give back the blocks behind position `num_tokens - 1`."""
        keep = self._manager.blocks_for(num_tokens)
        if keep < len(self.blocks):
            self._manager.free(self.blocks[keep:])
            del self.blocks[keep:]
            self._slots = None

    def slots(self, start: int, stop: int) -> torch.Tensor:
        """Cache slots of positions `start .. stop - 1`, int64 on the CPU."""
        if self._slots is None:
            size = self._manager.block_size
            starts = torch.tensor(self.blocks, dtype=torch.int64) * size
            self._slots = (starts[:, None] + torch.arange(size)).flatten()
        return self._slots[start:stop]
