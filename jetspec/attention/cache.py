"""Block-managed storage of keys and values, used for the target and for the head's context alike."""

from __future__ import annotations

import torch
from torch import Tensor

from jetspec.errors import JetSpecError
from jetspec.recurrent.states import RecurrentStates


class KVCache:
    """Keys and values of several layers: [num_slots, kv_heads, width] in ``keys[layer]`` and ``values[layer]``.

    A slot holds one token; block b is the slots b * block_size to (b + 1) * block_size - 1. Which block belongs to
    which sequence is the caller's business. ``shapes`` gives (kv_heads, width) of each layer's keys, and
    ``value_shapes`` of its values where these have other shapes. ``states`` are those of recurrent layers, if any.
    """

    def __init__(
        self,
        shapes: list[tuple[int, int]],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        value_shapes: list[tuple[int, int]] | None = None,
        states: RecurrentStates | None = None,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise JetSpecError(f"num_blocks ({num_blocks}) and block_size ({block_size}) must be at least 1")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.num_slots = num_blocks * block_size
        self.dtype, self.device = dtype, torch.device(device)
        self.keys = [self._pool(shape) for shape in shapes]
        self.values = [self._pool(shape) for shape in value_shapes or shapes]
        self.states = states

    def _pool(self, shape: tuple[int, int]) -> Tensor:
        # Not zeroed: a slot is written before it is read, and memory that no sequence reaches is never touched.
        return torch.empty(self.num_slots, *shape, dtype=self.dtype, device=self.device)

    @property
    def num_layers(self) -> int:
        """Layers with keys and values of their own."""
        return len(self.keys)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [n, kv_heads, width] at slots [n]."""
        self.keys[layer].index_copy_(0, slots, k)
        self.values[layer].index_copy_(0, slots, v)

    def read(self, layer: int, slots: Tensor | slice) -> tuple[Tensor, Tensor]:
        """k, v [n, kv_heads, width] at slots [n]; a slice of slots is read as a view, without a copy."""
        if isinstance(slots, slice):
            return self.keys[layer][slots], self.values[layer][slots]
        return self.keys[layer].index_select(0, slots), self.values[layer].index_select(0, slots)

    def move(self, src: Tensor, dst: Tensor) -> None:
        """Copy slots src [n] to dst [n] in every layer; the two may overlap (all is gathered before it is written)."""
        src, dst = src.to(self.device), dst.to(self.device)
        for pool in self.keys + self.values:
            pool.index_copy_(0, dst, pool.index_select(0, src))
