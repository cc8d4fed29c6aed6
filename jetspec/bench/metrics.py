"""Figures of a run, from its records alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from jetspec.bench.records import BASELINE, Cell, Group, Run
from jetspec.config import Config

#: Resamples of a bootstrap interval, and the share of them that lies inside it.
RESAMPLES = 2000
CONFIDENCE = 0.95


class Figures(Config):
    """The figures of a cell. A figure is None if it does not apply, or has nothing to be compared with.

    Args:
        cell: what was measured.
        groups: number of groups.
        tokens: tokens that came while decoding.
        tokens_per_s: those tokens over the seconds of decoding.
        prefill_s: seconds of reading prompts.
        speedup: tokens a second over the baseline's on the same groups.
        speedup_interval: bootstrap interval of ``speedup``.
        acceptance_length: tokens that a sequence's verify forward commits, bonus token included.
        depths: for d = 1, 2, ...: share of the verify forwards that committed at least d drafted tokens and one more.
        rows: rows of a sequence's verify forward.
        split: share of the decoding seconds of each of `PARTS`; sums to 1.
        identical: number of answers equal to the baseline's.
        compared: number of answers that can be compared with the baseline's.
        accuracy: share of the scored answers that solve their task.
        scored: number of answers that can be scored.
        peak_bytes: most device memory that was allocated.
    """

    cell: Cell
    groups: int
    tokens: int
    tokens_per_s: float | None
    prefill_s: float
    speedup: float | None
    speedup_interval: tuple[float, float] | None
    acceptance_length: float | None
    depths: list[float]
    rows: float | None
    split: dict[str, float]
    identical: int | None
    compared: int
    accuracy: float | None
    scored: int
    peak_bytes: int | None


def figures(run: Run) -> list[Figures]:
    """Figures of every cell with at least one group, in order of first appearance."""
    by_cell = groups_by_cell(run)
    return [_figures(cell, groups, _baseline(cell, by_cell)) for cell, groups in by_cell.items()]


def groups_by_cell(run: Run) -> dict[Cell, list[Group]]:
    """Groups of every cell, cells as they first appear."""
    groups: dict[Cell, list[Group]] = defaultdict(list)
    for group in run.groups:
        groups[group.cell].append(group)
    return groups


def _baseline(cell: Cell, by_cell: dict[Cell, list[Group]]) -> dict[int, Group]:
    groups = by_cell.get(cell.replace(method=BASELINE, budget=None), [])
    return {group.index: group for group in groups}


def _figures(cell: Cell, groups: list[Group], baseline: dict[int, Group]) -> Figures:
    tokens, seconds = sum(g.tokens for g in groups), sum(g.decode_s for g in groups)
    pairs = [(g, baseline[g.index]) for g in groups if g.index in baseline]
    # Answers of a single token, which comes with the prompt, have no rate.
    decoded = bool(sum(g.tokens for g, _ in pairs) and sum(b.tokens for _, b in pairs))
    rounds: Counter[int] = Counter()
    for group in groups:
        rounds.update({int(committed): count for committed, count in group.rounds.items()})
    forwards = rounds.total()
    same = _identical(pairs) if cell.method != BASELINE and _comparable(cell) else []
    scored = [a.correct for g in groups for a in g.answers if a.correct is not None]
    split = Counter[str]()
    for group in groups:
        split.update(group.split_s)
    peaks = [g.peak_bytes for g in groups if g.peak_bytes is not None]
    return Figures(
        cell=cell,
        groups=len(groups),
        tokens=tokens,
        tokens_per_s=tokens / seconds if tokens and seconds else None,
        prefill_s=sum(g.prefill_s for g in groups),
        speedup=speedup(pairs) if decoded else None,
        speedup_interval=speedup_interval(pairs) if decoded and len(pairs) > 1 and cell.method != BASELINE else None,
        acceptance_length=sum(n * count for n, count in rounds.items()) / forwards if forwards else None,
        depths=[
            sum(count for n, count in rounds.items() if n > d) / forwards for d in range(1, max(rounds, default=1))
        ],
        rows=sum(g.rows for g in groups) / forwards if forwards else None,
        split={name: part / split.total() for name, part in split.items()} if split.total() else {},
        identical=sum(same) if same else None,
        compared=len(same),
        accuracy=sum(scored) / len(scored) if scored else None,
        scored=len(scored),
        peak_bytes=max(peaks, default=None),
    )


def speedup(pairs: Sequence[tuple[Group, Group]]) -> float:
    """Tokens a second of the first of each pair over those of the second, all groups together."""
    return float(_speedups(_rates(pairs), np.arange(len(pairs))[None])[0])


def speedup_interval(pairs: Sequence[tuple[Group, Group]], seed: int = 0) -> tuple[float, float]:
    """Percentile bootstrap interval of `speedup` over the groups (Efron, 1979), which are drawn as pairs."""
    draws = np.random.default_rng(seed).integers(len(pairs), size=(RESAMPLES, len(pairs)))
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(_speedups(_rates(pairs), draws), [tail, 100 - tail])
    return float(low), float(high)


def _rates(pairs: Sequence[tuple[Group, Group]]) -> np.ndarray:
    """[pairs, 4]: tokens and seconds of the method, then of the baseline."""
    return np.array([[g.tokens, g.decode_s, b.tokens, b.decode_s] for g, b in pairs], dtype=float)


def _speedups(rates: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """One speed-up for each row of `draws` [n, groups]. Groups too short to decode anything have no rate: 0."""
    tokens, seconds, base_tokens, base_seconds = np.moveaxis(rates[draws].sum(axis=1), 1, 0)
    below = seconds * base_tokens
    return np.divide(tokens * base_seconds, below, out=np.zeros_like(below), where=below > 0)


def _comparable(cell: Cell) -> bool:
    """Whether a cell's answers must be the baseline's: transformers draws its noise in another way."""
    return cell.method != "hf" or cell.temperature == 0


def _identical(pairs: Sequence[tuple[Group, Group]]) -> list[bool]:
    """For each answer that the baseline gave, too, whether it is the same."""
    same = []
    for group, base in pairs:
        known = {(a.question, a.turn): a.token_ids for a in base.answers}
        same += [known[a.question, a.turn] == a.token_ids for a in group.answers if (a.question, a.turn) in known]
    return same
