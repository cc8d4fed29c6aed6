"""What a caller may watch of a running engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Committed:
    """Rows of one sequence whose K/V became final, in order: positions `start .. start + len(token_ids) - 1`.

    `aux_hidden_states` is `[n, aux_layers * hidden]`, `hidden` the state after the final norm, `[n, hidden]`; each is
    None unless the engine was asked for it.
    """

    request_id: str
    start: int
    token_ids: list[int]
    aux_hidden_states: torch.Tensor | None
    hidden: torch.Tensor | None


@dataclass
class RoundRecord:
    """One verify forward of one sequence: its draft tree in row order, and the walk through it."""

    request_id: str
    tokens: list[int]
    parents: list[int]
    log_probs: list[float]
    accepted_rows: list[int]
    new_tokens: list[int]


@dataclass
class EngineStep:
    """One round of the engine over all sequences: what it ran, what came of it, and where its seconds went.

    `draft_s` is the drafter's work, trees included; `select_s` the choice of the nodes to verify and their layout.
    The expected numbers are the budget's own forecast; None where nothing was drafted or the budget is fixed.
    """

    rows: int
    decoding: int
    drafted: int
    new_tokens: int
    draft_s: float
    select_s: float
    verify_s: float
    accept_s: float
    commit_s: float
    total_s: float
    expected_tokens: float | None = None
    expected_s: float | None = None


class Observer:
    """Base class whose methods do nothing; pass a subclass to the engine and override what you need."""

    def committed(self, rows: Committed) -> None:
        """The engine calls this for each sequence whose rows became final in a round."""

    def round(self, record: RoundRecord) -> None:
        """The engine calls this for each sequence whose draft tree was verified in a round."""

    def step(self, record: EngineStep) -> None:
        """The engine calls this once at the end of each round."""
