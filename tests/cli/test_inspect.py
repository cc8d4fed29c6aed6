"""`jetspec inspect` on a tiny target and head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jetspec.cli.inspect import Node, draw
from tests.helpers.cli import call, models


def test_inspect_draws_the_tree(folder: Path) -> None:
    result = call("inspect", "Hello", *models(folder), "--round", 2)
    assert result.exit_code == 0, result.output
    assert "round 2" in result.stdout
    assert "newest token" in result.stdout
    assert "└╴" in result.stdout


def test_inspect_json_is_the_round(folder: Path) -> None:
    data = json.loads(call("inspect", "Hello", *models(folder), "--round", 2, "--json").stdout)
    nodes = data["nodes"]
    assert len(nodes) == 32
    assert nodes[0]["parent"] == -1
    for node in nodes[1:]:
        above = nodes[node["parent"]]
        assert node["path_probability"] == pytest.approx(above["path_probability"] * node["probability"], rel=1e-4)
        assert not node["accepted"] or above["accepted"]
    accepted = [node["token_id"] for node in nodes[1:] if node["accepted"]]
    assert data["new_token_ids"] == [*accepted, data["bonus"]["token_id"]]
    # The root is the newest token of what plain decoding has said so far.
    plain = call("generate", "Hello", *models(folder), "--max-tokens", 40, "--json")
    tokens = json.loads(plain.stdout)["token_ids"]
    start = tokens.index(nodes[0]["token_id"])
    assert tokens[start + 1 : start + 1 + len(data["new_token_ids"])] == data["new_token_ids"]


def test_deep_trees_fit_80_columns() -> None:
    from rich.console import Console

    chain = [Node(i, i - 1, 7, " word", 0.5, 0.5**i, i < 3) for i in range(16)]
    console = Console(width=80, record=True, color_system=None)
    with console.capture() as capture:
        console.print(draw(chain))
    lines = capture.get().splitlines()
    assert len(lines) == 16
    assert sum("accepted" in line for line in lines) == 2


def test_inspect_past_the_end(folder: Path) -> None:
    # 500 of the 512 positions of its context.
    result = call("inspect", "x" * 500, "--raw", *models(folder), "--round", 13)
    assert result.exit_code == 1
    assert "--round 13" in result.stderr
