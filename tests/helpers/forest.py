"""Helpers: sequences in shuffled blocks, batches of their rows, random trees, and transformers' own forward."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from jetspec.attention import KVCache, RowBatch, Segment
from jetspec.models.target import Target, TargetOutput
from jetspec.recurrent.states import EMPTY_STATE, StateWrite
from jetspec.tree import chain_parents
from tests.helpers.tiny import VOCAB_SIZE


def random_ids(n: int, seed: int) -> Tensor:
    return torch.randint(0, VOCAB_SIZE, (n,), generator=torch.Generator().manual_seed(seed))


def random_parents(n: int, rng: random.Random) -> Tensor:
    """A random tree of n rows under one root."""
    return torch.tensor([-1] + [rng.randrange(index) for index in range(1, n)])


def paths(parents: Tensor) -> list[list[int]]:
    """The rows of every path from a root to a leaf."""
    found = []
    for leaf in sorted(set(range(len(parents))) - set(parents.tolist())):
        path, row = [], leaf
        while row >= 0:
            path.insert(0, row)
            row = int(parents[row])
        found.append(path)
    return found


def depths(parents: Tensor) -> Tensor:
    result: list[int] = []
    for parent in parents.tolist():
        result.append(0 if parent < 0 else result[parent] + 1)
    return torch.tensor(result)


@dataclass
class Part:
    """Rows to score next for one sequence."""

    sequence: int
    token_ids: Tensor
    parents: Tensor

    @classmethod
    def chain(cls, sequence: int, token_ids: Tensor) -> Part:
        return cls(sequence, token_ids, chain_parents(len(token_ids)))


@dataclass
class Pool:
    """Sequences of up to `blocks_each` blocks, scattered over one cache; blocks of block 0 belong to nobody."""

    target: Target
    num_sequences: int = 1
    blocks_each: int = 24
    block_size: int = 4
    seed: int = 0
    target_layer_ids: Sequence[int] = ()
    committed: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        num_blocks = self.num_sequences * self.blocks_each + 1
        self.cache: KVCache = self.target.new_cache(num_blocks, self.block_size, self.num_sequences)
        blocks = list(range(1, num_blocks))
        random.Random(self.seed).shuffle(blocks)
        offsets = torch.arange(self.block_size)
        self.tables = [
            torch.cat([block * self.block_size + offsets for block in blocks[index :: self.num_sequences]])
            for index in range(self.num_sequences)
        ]
        self.starts = [0] * self.num_sequences
        self.committed = [torch.empty(0, dtype=torch.int64) for _ in range(self.num_sequences)]

    def batch(self, parts: list[Part]) -> RowBatch:
        segments, positions, start = [], [], 0
        for part in parts:
            context, n = len(self.committed[part.sequence]), len(part.token_ids)
            slots = self.tables[part.sequence][: context + n]
            segments.append(Segment(start, start + n, context, slots, 1 + part.sequence if context else EMPTY_STATE))
            self.starts[part.sequence] = start
            positions.append(context + depths(part.parents))
            start += n
        ids = torch.cat([part.token_ids for part in parts])
        return RowBatch(ids, torch.cat(positions), torch.cat([part.parents for part in parts]), segments)

    def forward(self, parts: list[Part], logits_rows: Tensor | None = None, final_hidden: bool = False) -> TargetOutput:
        return self.target.forward(self.batch(parts), self.cache, logits_rows, self.target_layer_ids, final_hidden)

    def commit(self, part: Part, rows: list[int]) -> None:
        """Keep the K/V of the accepted rows, in order; the others are given up."""
        context = len(self.committed[part.sequence])
        table = self.tables[part.sequence]
        self.cache.move(table[context + torch.tensor(rows)], table[context : context + len(rows)])
        states = self.cache.states
        if states is not None:
            kept = list(states.rows)  # other parts may be committed after this one
            source = 1 + part.sequence if context else EMPTY_STATE
            start = self.starts[part.sequence]
            states.commit([StateWrite(source, [start + row for row in rows], 1 + part.sequence)])
            states.rows = kept
        self.committed[part.sequence] = torch.cat([self.committed[part.sequence], part.token_ids[rows]])

    def prefill(self, sequence: int, token_ids: Tensor) -> None:
        part = Part.chain(sequence, token_ids)
        self.forward([part])
        self.commit(part, list(range(len(token_ids))))

    def poison(self) -> None:
        """Spoil every slot that holds no committed token."""
        spoiled = torch.ones(self.cache.num_slots, dtype=torch.bool)
        for table, committed in zip(self.tables, self.committed):
            spoiled[table[: len(committed)]] = False
        for pool in self.cache.keys + self.cache.values:
            pool[spoiled] = float("nan")
        for pool in self.cache.states.pools if self.cache.states is not None else ():
            pool[[1 + i for i, committed in enumerate(self.committed) if not len(committed)]] = float("nan")


@torch.no_grad()
def plain_forward(
    model: PreTrainedModel, sequences: Sequence[Tensor], target_layer_ids: Sequence[int] = ()
) -> list[tuple[Tensor, Tensor]]:
    """transformers' own logits [n, V] and hidden_states[l + 1] [n, layers * H] of each sequence.

    The model is causal, so padding on the right changes nothing and one forward serves all sequences.
    """
    padded = torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)
    output = model(padded, use_cache=False, output_hidden_states=True)
    hidden = [output.hidden_states[layer + 1] for layer in target_layer_ids]
    aux_hidden_states = torch.cat(hidden, dim=-1) if hidden else torch.empty(*padded.shape, 0)
    return [(output.logits[i, : len(ids)], aux_hidden_states[i, : len(ids)]) for i, ids in enumerate(sequences)]
