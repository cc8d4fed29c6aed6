"""What a caller may watch of a running engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Committed:
    """Rows of one sequence whose K/V became final, in order: positions `start .. start + len(token_ids) - 1`.

    `taps` is `[n, num_taps * hidden]`, `hidden` the state after the final norm, `[n, hidden]`; each is None unless the
    engine was asked for it.
    """

    request_id: str
    start: int
    token_ids: list[int]
    taps: torch.Tensor | None
    hidden: torch.Tensor | None


@dataclass
class Round:
    """One verify forward of one sequence: its draft tree in row order, and the walk through it."""

    request_id: str
    tokens: list[int]
    parents: list[int]
    log_probs: list[float]
    accepted_rows: list[int]
    new_tokens: list[int]


class Observer:
    """Base class whose methods do nothing; pass a subclass to the engine and override what you need."""

    def committed(self, rows: Committed) -> None: ...

    def round(self, record: Round) -> None: ...
