"""`jetspec demo` on a tiny target and head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import jetspec.engine.accept as accept_module
from jetspec.cli.demo import PROMPTS
from tests.helpers.cli import call, models, trusting_next_token


def test_demo_prints_the_table(folder: Path) -> None:
    result = call("demo", *models(folder), "--max-tokens", 8)
    assert result.exit_code == 0, result.output
    for word in ("tokens per second", "acceptance length", "speed-up", "tokens identical", "yes"):
        assert word in result.stdout
    for prompt in PROMPTS:
        assert prompt[:40] in result.stdout


def test_demo_json_is_the_table_alone(folder: Path) -> None:
    result = call("demo", *models(folder), "--max-tokens", 8, "--json")
    assert result.exit_code == 0, result.output
    table = json.loads(result.stdout)
    keys = {"plain_tokens_per_s", "jetspec_tokens_per_s", "speedup", "acceptance_length", "identical"}
    assert set(table) == keys
    assert table["identical"] is True
    assert table["speedup"] == pytest.approx(table["jetspec_tokens_per_s"] / table["plain_tokens_per_s"], rel=0.05)
    assert table["acceptance_length"] >= 1


def test_demo_fails_where_tokens_differ(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept_module, "next_token", trusting_next_token)
    result = call("demo", *models(folder), "--max-tokens", 8, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["identical"] is False
    assert "differ" in result.stderr
