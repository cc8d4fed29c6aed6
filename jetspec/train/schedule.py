"""The sequences of a step, their share among processes, and its learning rate: functions of the step number alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jetspec.errors import JetSpecError
from jetspec.train.blocks import plan_epoch


class DataOrder:
    """The sequences of every step, epoch after epoch."""

    def __init__(
        self, block_counts: Sequence[int], blocks_per_step: int, *, seed: int, epochs: int, max_steps: int | None = None
    ) -> None:
        """Raises JetSpecError where no sequence holds a block."""
        if not any(block_counts):
            raise JetSpecError("prompts: no answer holds a token to train on; raise max_tokens or check the responses")
        self._epochs: list[list[list[int]]] = []
        self._starts = [0]
        while self._starts[-1] < max_steps if max_steps is not None else len(self._epochs) < epochs:
            plan = plan_epoch(block_counts, blocks_per_step, seed=seed, epoch=len(self._epochs))
            self._epochs.append(plan)
            self._starts.append(self._starts[-1] + len(plan))
        self.num_steps = self._starts[-1] if max_steps is None else max_steps

    def step(self, step: int) -> tuple[int, list[int]]:
        """(epoch, sequences) of step 0 .. num_steps - 1."""
        epoch = next(e for e in range(len(self._epochs)) if step < self._starts[e + 1])
        return epoch, self._epochs[epoch][step - self._starts[epoch]]


def share_out(sequences: Sequence[int], block_counts: Sequence[int], processes: int) -> list[list[int]]:
    """The sequences of each process, with about as many blocks for each: the largest go to the least loaded."""
    shares: list[list[int]] = [[] for _ in range(processes)]
    loads = [0] * processes
    for sequence in sorted(sequences, key=lambda s: -block_counts[s]) if processes > 1 else sequences:
        least = loads.index(min(loads))
        shares[least].append(sequence)
        loads[least] += block_counts[sequence]
    return shares


def learning_rate(step: int, num_steps: int, *, peak: float, floor: float, warmup: float) -> float:
    """Rate of step 0 .. num_steps - 1: linear over a ``warmup`` share, then a cosine from peak to ``floor * peak``."""
    warm = max(1, round(warmup * num_steps))
    if step < warm:
        return peak * (step + 1) / warm
    done = (step - warm) / max(1, num_steps - 1 - warm)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))
