"""How long a round takes: measured when the engine starts, refined with every round."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

import numpy as np
import torch

from jetspec.attention import KVCache, RowBatch
from jetspec.models.target import Target

#: Rows whose forwards are timed at the start, as far as memory, context and MEASURE_SECONDS allow.
MEASURED_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
#: Stop measuring larger forwards when this much time is spent.
MEASURE_SECONDS = 5.0
#: Share of a newly seen deviation that the curve takes over.
LEARNING_RATE = 0.15
#: A single round is off by more than this factor only by accident.
MAX_DEVIATION = 2.0


class TimeCurve:
    """Seconds against a count, linear between the measured counts and beyond the last one; never falling."""

    def __init__(self, counts: Seq[int], seconds: Seq[float]) -> None:
        self._counts = np.asarray(counts, dtype=float)
        self._seconds = np.maximum.accumulate(np.asarray(seconds, dtype=float))

    def __call__(self, count: np.ndarray | float) -> np.ndarray:
        """Seconds at each count, in an array of the same shape as `count`."""
        counts, seconds = self._counts, self._seconds
        inside = np.asarray(np.interp(count, counts, seconds))
        if len(counts) == 1:
            return inside
        slope = (seconds[-1] - seconds[-2]) / (counts[-1] - counts[-2])
        seconds_at: np.ndarray = inside + np.maximum(np.asarray(count) - counts[-1], 0) * slope
        return seconds_at

    def observe(self, count: float, seconds: float) -> None:
        """Move the curve towards an observation, most where it was made."""
        deviation = np.clip(seconds / max(float(self(count)), 1e-9), 1 / MAX_DEVIATION, MAX_DEVIATION) - 1
        nearness = 1 / (1 + np.abs(np.log2(self._counts / count)))
        self._seconds = np.maximum.accumulate(self._seconds * (1 + LEARNING_RATE * nearness * deviation))


class CostModel:
    """Seconds of a round: all but the draft by its rows and the keys they attend to, the draft by its sequences.

    `key_seconds` is the time one row takes to attend to one more key.
    """

    def __init__(self, rows: TimeCurve, key_seconds: float = 0.0, draft: TimeCurve | None = None) -> None:
        self.rows = rows
        self.key_seconds = key_seconds
        self.draft = draft
        self._drafts = 0

    def verify_seconds(self, rows: np.ndarray | float, keys: np.ndarray | float) -> np.ndarray:
        """All of a round but the draft, for this many rows with `keys` row-key pairs."""
        return self.rows(rows) + self.key_seconds * np.asarray(keys)

    def draft_seconds(self, sequences: int) -> float:
        """A draft for this many sequences; 0 before one was timed."""
        return float(self.draft(sequences)) if self.draft is not None else 0.0

    def observe_verify(self, rows: int, keys: int, seconds: float) -> None:
        """Learn that a round of `rows` rows and `keys` row-key pairs took `seconds` without its draft."""
        own = seconds - self.key_seconds * keys
        self.rows.observe(rows, max(own, seconds / MAX_DEVIATION))

    def observe_draft(self, sequences: int, seconds: float) -> None:
        """Learn from a draft for `sequences` sequences that took `seconds`. The first one is ignored."""
        self._drafts += 1
        if self.draft is not None:
            self.draft.observe(sequences, seconds)
        elif self._drafts > 1:  # the first draft packs weights and compiles kernels
            # How the time grows with the sequences is a guess until other numbers of them are seen.
            counts = [2**i for i in range(11)]
            self.draft = TimeCurve(counts, [seconds * (0.75 + 0.25 * c / sequences) for c in counts])


def rows_to_measure(tile_sizes: Seq[int]) -> list[int]:
    """Row counts between which the time grows evenly; with tiles it jumps behind each of them."""
    if not tile_sizes:
        return list(MEASURED_ROWS)
    tile = tile_sizes[0]
    return [1, tile, tile + 1, 2 * tile, 2 * tile + 1, 4 * tile, 8 * tile]


@torch.inference_mode()
def measure(target: Target, cache: KVCache, max_num_batched_tokens: int, target_layer_ids: Seq[int] = ()) -> CostModel:
    """Time forwards of growing size in `cache`, whose contents are lost."""
    room = min(max_num_batched_tokens, cache.num_slots, target.max_context)
    counts = [n for n in rows_to_measure(target.tile_sizes) if n <= room]
    seconds: list[float] = []
    began = time.perf_counter()
    _forward_seconds(target, cache, 0, 1, target_layer_ids)  # the first forward packs weights and compiles kernels
    for n in counts:
        seconds.append(min(_forward_seconds(target, cache, 0, n, target_layer_ids) for _ in range(2)))
        if time.perf_counter() - began > MEASURE_SECONDS:
            break
    curve = TimeCurve(counts[: len(seconds)], seconds)
    rows = counts[min(len(seconds) - 1, len(counts) // 2)]
    context = min(1024, cache.num_slots - rows, target.max_context - rows)
    if context < 1:
        return CostModel(curve)
    for pool in cache.keys + cache.values:  # unwritten storage may hold numbers that are slow to compute with
        pool[:context] = 0
    long = min(_forward_seconds(target, cache, context, rows, target_layer_ids) for _ in range(2))
    return CostModel(curve, max(0.0, long - float(curve(rows))) / (rows * context))


def _forward_seconds(target: Target, cache: KVCache, context: int, rows: int, target_layer_ids: Seq[int]) -> float:
    # Different tokens, so that a mixture of experts spreads them as text does.
    tokens = torch.arange(rows) % target.num_embeddings
    # The state of a sequence that is to come: a forward reads it and leaves it as it is.
    batch = RowBatch.chains([tokens], [torch.arange(context + rows)], [1]).to(target.device)
    start = time.perf_counter()
    logits = target.forward(batch, cache, target_layer_ids=target_layer_ids).logits
    logits[-1, -1].item()  # waits for an accelerator
    return time.perf_counter() - start
