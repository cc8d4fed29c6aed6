"""Which blocks a sequence is trained on: anchors, the rows that teach them and their weights.

Everything here is a pure function of its arguments; randomness is keyed by (seed, epoch, sequence), so a resumed run
sees the blocks that an uninterrupted one would have seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """The blocks of one sequence in one step.

    Row (a, d - 1) of ``teacher_rows`` and ``weights`` belongs to block a at depth d, 1 <= d < B.
    """

    anchors: Tensor  # [A] int64, position of each block's anchor
    teacher_rows: Tensor  # [A, B - 1] int64: position whose final hidden state predicts token anchor + d
    weights: Tensor  # [A, B - 1] float32, 0 where the row carries no loss


def keyed_generator(*key: int | str) -> torch.Generator:
    """A CPU generator that depends on ``key`` alone, on every machine."""
    data = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(data, "little") >> 1)


def anchor_range(length: int, loss_start: int) -> range:
    """Positions that may anchor a block: the token after each is one the target wrote.

    ``loss_start`` is the position of the first such token. Position 0 has no context, so it never anchors.
    """
    return range(max(1, loss_start - 1), length - 1)


def sample_anchors(length: int, loss_start: int, count: int, generator: torch.Generator) -> Tensor:
    """At most ``count`` distinct anchors, uniformly drawn, in rising order. [A] int64."""
    candidates = anchor_range(length, loss_start)
    picks = torch.randperm(len(candidates), generator=generator)[:count]
    return picks.sort().values + candidates.start


def depth_weights(block_size: int, gamma: float) -> Tensor:
    """Weight of depth d = 1 .. B - 1: ``exp(-(d - 1) / gamma)``. A token counts only if all before it were right."""
    return torch.exp(-torch.arange(block_size - 1, dtype=torch.float32) / gamma)


def make_blocks(length: int, anchors: Tensor, block_size: int, gamma: float) -> Blocks:
    """Blocks of a sequence of ``length`` tokens at ``anchors`` [A]. Rows past its end weigh nothing."""
    predicted = anchors[:, None] + torch.arange(1, block_size)
    weights = depth_weights(block_size, gamma) * (predicted < length)
    return Blocks(anchors, (predicted - 1).clamp(max=length - 1), weights)


def plan_epoch(block_counts: Sequence[int], blocks_per_step: int, *, seed: int, epoch: int) -> list[list[int]]:
    """The sequences of each step of an epoch, in an order of the epoch's own.

    A step takes sequences until it holds ``blocks_per_step`` blocks; sequences without blocks are left out, and the
    last step may be smaller.
    """
    order = torch.randperm(len(block_counts), generator=keyed_generator(seed, epoch, "order")).tolist()
    steps: list[list[int]] = []
    filled = blocks_per_step
    for sequence in order:
        if block_counts[sequence] == 0:
            continue
        if filled >= blocks_per_step:
            steps.append([])
            filled = 0
        steps[-1].append(sequence)
        filled += block_counts[sequence]
    return steps
