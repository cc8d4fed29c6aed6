"""`jetspec generate` on a tiny target and head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.cli import call, models


def test_generate_streams_one_answer(folder: Path) -> None:
    text = call("generate", "Hello", *models(folder), "--max-tokens", 12, "--json")
    live = call("generate", "Hello", *models(folder), "--max-tokens", 12)
    assert live.exit_code == 0, live.output
    assert live.stdout == json.loads(text.stdout)["text"] + "\n"
    assert "12 tokens" in live.stderr


def test_generate_equals_plain_decoding(folder: Path) -> None:
    options = ("--max-tokens", 20, "--json", "--temperature", 0.9, "--seed", 3, "--raw", "--ignore-eos")
    drafted = call("generate", "one", "another one", *models(folder), *options)
    plain = call("generate", "one", "another one", "--target", folder / "target", "--draft", "none", *options)
    left, right = ([json.loads(line) for line in r.stdout.splitlines()] for r in (drafted, plain))
    assert [r["token_ids"] for r in left] == [r["token_ids"] for r in right]
    assert [r["completion_tokens"] for r in left] == [20, 20]
    assert [r["prompt"] for r in left] == ["one", "another one"]
    assert [r["prompt_tokens"] for r in left] == [3, 11]
    assert all(r["acceptance_length"] == 1 for r in right)


def test_chat_template_is_the_default(folder: Path) -> None:
    default, chat, raw = (
        json.loads(call("generate", "Hi", *models(folder), "--max-tokens", 2, "--json", *mode).stdout)["prompt_tokens"]
        for mode in ((), ("--chat",), ("--raw",))
    )
    assert default == chat > raw == 2


def test_generate_reads_files_and_stdin(folder: Path, tmp_path: Path) -> None:
    plain, lines = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    plain.write_text("first\n\nsecond\n")
    lines.write_text('{"question": "first"}\n{"prompt": "second"}\n')
    options = (*models(folder), "--max-tokens", 3, "--json")
    from_text, from_lines = call("generate", "-f", plain, *options), call("generate", "-f", lines, *options)
    found = [[json.loads(line)["prompt"] for line in r.stdout.splitlines()] for r in (from_text, from_lines)]
    assert found == [["first", "second"]] * 2
    piped = call("generate", *options, input="from a pipe\n")
    assert json.loads(piped.stdout)["prompt"] == "from a pipe"


@pytest.mark.parametrize("method", ["tree", "chain", "model", "ngram"])
def test_generate_with_every_draft_method(folder: Path, method: str) -> None:
    draft = {"model": ("--draft", folder / "target"), "ngram": ()}.get(method, ("--draft", folder / "head"))
    common = ("--target", folder / "target", "--max-tokens", 8, "--json", "abc abc")
    drafted = call("generate", *draft, "--draft-method", method, "--tree-budget", 6, *common)
    assert drafted.exit_code == 0, drafted.output
    plain = call("generate", "--draft", "none", *common)
    assert json.loads(drafted.stdout)["token_ids"] == json.loads(plain.stdout)["token_ids"]


def test_generate_refuses_unknown_methods_and_budgets(folder: Path) -> None:
    assert "draft_method" in call("generate", *models(folder), "--draft-method", "magic", "abc").output
    assert call("generate", *models(folder, "many"), "abc").exit_code == 2


def test_prompt_files_are_cut_at_newlines_only(tmp_path: Path) -> None:
    from jetspec.prompts import read_prompts

    records, lines = tmp_path / "p.jsonl", tmp_path / "p.txt"
    records.write_text(json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False) + "\n", encoding="utf-8-sig")
    lines.write_text("a\x0cb\u2028c\r\nd\n", encoding="utf-8-sig", newline="")
    assert read_prompts(records) == ["a\u2028b"]
    assert read_prompts(lines) == ["a\x0cb\u2028c", "d"]
