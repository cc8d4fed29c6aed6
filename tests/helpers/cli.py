"""Calling the command line in tests."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner, Result

import jetspec.engine.accept as accept_module
from jetspec.cli import app

COMMANDS = ("demo", "generate", "train", "bench", "export", "verify", "inspect")


def call(*arguments: object, input: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], input=input)


def models(folder: Path, budget: int | str = 32) -> tuple[object, ...]:
    return ("--target", folder / "target", "--draft", folder / "head", "--tree-budget", budget)


next_token = accept_module.next_token


def trusting_next_token(scheduled, row, logits, choices):
    """A fault, in place of `next_token`: takes the first draft token for the target's own choice."""
    tokens, parents = (values[scheduled.num_known :] for values in (scheduled.token_ids, scheduled.parents))
    return tokens[parents.index(row)] if row in parents else next_token(scheduled, row, logits, choices)
