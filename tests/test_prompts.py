"""Prompt sources: what a row may be, where it stands, what is wrong with it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jetspec.errors import JetSpecError
from jetspec.prompts import BadRows, Row, open_prompt, read_rows, shown

USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}


def read(path: Path, text: str) -> list[Row]:
    path.write_text(text, encoding="utf-8")
    bad = BadRows()
    rows = read_rows(path, bad)
    bad.raise_if_any()
    return rows


@pytest.mark.parametrize(
    ("record", "prompt"),
    [
        ({"prompt": "hi"}, "hi"),
        ({"question": "hi", "answer": "ignored"}, "hi"),
        ({"text": "hi", "messages": None}, "hi"),
        ({"prompt_token_ids": [1, 2], "text": "hi"}, [1, 2]),
        ({"messages": [USER, ASSISTANT]}, [USER, ASSISTANT]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"text": "i"}]}]}, [USER]),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}, [USER, ASSISTANT]),
        (
            {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "hi"}]},
            [{"role": "system", "content": "s"}, USER],
        ),
    ],
)
def test_every_form_of_a_row(tmp_path: Path, record: dict, prompt: object) -> None:
    where = f"{tmp_path / 'p.jsonl'}, line 2"
    assert read(tmp_path / "p.jsonl", "\n" + json.dumps(record)) == [Row(where, prompt)]
    [row] = read(tmp_path / "p.json", json.dumps([record], indent=1))
    assert row.prompt == prompt


def test_answers_and_tools(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    records = [
        {"prompt": "a", "response": "b"},
        {"prompt": "a", "response_token_ids": [3], "response": "unused"},
        {"messages": [USER], "tools": tools},
    ]
    rows = read(tmp_path / "p.jsonl", "\n".join(map(json.dumps, records)))
    assert [(r.response, r.tools) for r in rows] == [("b", None), ([3], None), (None, tools)]


def test_items_of_an_array_know_their_lines(tmp_path: Path) -> None:
    rows = read(tmp_path / "p.json", '[\n  {"prompt": "a [, "},\n\n  {"prompt":\n "b"}, "c"\n]\n')
    assert [(r.where.rsplit(" ", 1)[1], r.prompt) for r in rows] == [("2", "a [, "), ("4", "b"), ("5", "c")]
    lines = read(tmp_path / "lines.json", '{"prompt": "a"}\n{"prompt": "b"}\n')
    assert [r.prompt for r in lines] == ["a", "b"]
    with pytest.raises(JetSpecError, match=r"p\.json: not valid JSON: .*line 2"):
        read(tmp_path / "p.json", '[{"prompt": "a"},\n{"prompt" "b"}]')


def test_plain_text_has_a_prompt_a_line(tmp_path: Path) -> None:
    rows = read(tmp_path / "p.txt", "a \u2028b\r\n\n{c\n")
    assert [(r.where.rsplit(" ", 1)[1], r.prompt) for r in rows] == [("1", "a \u2028b"), ("3", "{c")]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{", "not valid JSON"),
        ([1], "not a JSON object"),
        ({"prompts": "hi"}, "no prompt: give one of prompt.*; there are prompts"),
        ({"prompt": 3}, "prompt: must be a text"),
        ({"prompt": "hi", "response": ""}, "response: must be a text"),
        ({"prompt": "hi", "response_token_ids": ["a"]}, "response_token_ids: must be a list"),
        ({"messages": "hi"}, "messages: must be a list of turns"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\]: must be an object with the texts 'role'"),
        ({"messages": [ASSISTANT, USER]}, "messages: no turn before the assistant's"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, r"messages\[1\]: the assistant's turn is empty"),
        ({"messages": [USER, ASSISTANT], "response": "ho"}, "response: messages ends with the assistant's turn"),
        ({"conversations": [{"from": "bard", "value": "hi"}]}, r"conversations\[0\]: from='bard': one of human"),
    ],
)
def test_errors_name_file_line_and_field(tmp_path: Path, record: object, message: str) -> None:
    bad_line = record if isinstance(record, str) else json.dumps(record)
    with pytest.raises(JetSpecError, match=r"p\.jsonl, line 2: " + message):
        read(tmp_path / "p.jsonl", '{"prompt": "fine"}\n' + bad_line)


def test_bad_rows_are_counted_and_may_be_skipped(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + 7 * "{}\n")
    bad, said = BadRows(skip=True), []
    assert [r.prompt for r in read_rows(path, bad)] == ["fine"]
    bad.raise_if_any(said.append)
    assert "skipped 7 rows" in said[0]
    assert said[0].count("line ") == 5
    assert "and 2 more" in said[0]
    bad.raise_if_any(said.append)
    assert len(said) == 1
    refusing = BadRows()
    read_rows(path, refusing)
    with pytest.raises(JetSpecError, match=r"7 rows cannot be used; mend them:\n.*line 2: no prompt"):
        refusing.raise_if_any()


def test_an_empty_file_and_a_missing_one(tmp_path: Path) -> None:
    for name, text in (("p.jsonl", "\n"), ("p.json", "[]"), ("p.txt", "")):
        with pytest.raises(JetSpecError, match="holds none"):
            read(tmp_path / name, text)
    with pytest.raises(JetSpecError, match="cannot read prompts from"):
        read_rows(tmp_path / "absent.jsonl", BadRows())


class FakeDataset(list):
    column_names = ("question", "talk", "answer")


def test_hub_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = FakeDataset(
        [
            {"question": "a", "talk": [{"role": "user", "content": "x", "tool_calls": None}], "answer": None},
            {"question": "b", "talk": [{"role": "user", "content": "y", "tool_calls": None}], "answer": None},
        ]
    )
    calls: list[Any] = []

    def load_dataset(name: str, config: str | None, split: str) -> FakeDataset:
        calls.append((name, config, split))
        return rows

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    bad = BadRows()
    found = read_rows("hub:owner/name", bad)
    assert [(r.where, r.prompt) for r in found] == [("hub:owner/name, row 0", "a"), ("hub:owner/name, row 1", "b")]
    [first, _] = read_rows("hub:owner/name/main:test[:50%]:talk", bad)
    assert first.prompt == [{"role": "user", "content": "x"}]
    assert calls == [("owner/name", None, "train"), ("owner/name", "main", "test[:50%]")]
    assert not bad.errors
    with pytest.raises(JetSpecError, match="no column 'reply'; there are question, talk"):
        read_rows("hub:owner/name:train:reply", bad)
    with pytest.raises(JetSpecError, match="write hub:owner/name"):
        read_rows("hub:name", bad)


def test_hub_datasets_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(JetSpecError, match=r"needs the library datasets; pip install 'jetspec\[train\]'"):
        read_rows("hub:owner/name", BadRows())


def test_prompts_for_answering_and_for_people() -> None:
    assert open_prompt([USER, ASSISTANT, USER, ASSISTANT]) == [USER, ASSISTANT, USER]
    assert open_prompt("hi") == "hi"
    assert [shown(p) for p in ("a\n b", [USER], [1, 2])] == ["a b", "hi", "[1, 2]"]
