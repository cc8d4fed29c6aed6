"""Calling the command line in tests."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner, Result

import jetspec.engine.engine as engine_module
from jetspec.cli import app

COMMANDS = ("demo", "generate", "train", "bench", "export", "verify", "inspect")


def call(*arguments: object, input: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], input=input)


def models(folder: Path, budget: int | str = 32) -> tuple[object, ...]:
    return ("--target", folder / "target", "--draft", folder / "head", "--tree-budget", budget)


walk = engine_module.walk


def trusting_walk(tokens, parents, pick, **options):
    """A fault: takes the first draft token for the target's own choice."""
    return walk(tokens, parents, lambda row: tokens[parents.index(row)] if row in parents else pick(row), **options)
