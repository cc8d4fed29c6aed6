"""Records survive the file, and a file that was cut."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jetspec.bench.records import Answer, Cell, Failure, Group, Header, Record, read_run, to_line
from jetspec.errors import JetSpecError

CELL = Cell(dataset="gsm8k", method="jetspec", budget="auto", temperature=0.7, batch_size=4)
GROUP = Group(
    cell=CELL,
    index=3,
    answers=[
        Answer(question="a\u2028b", turn=0, token_ids=[1, 2, 3, 4], finish_reason="stop", correct=True),
        Answer(question="a\u2028b", turn=1, token_ids=[1, 2, 3, 4, 5], finish_reason="length"),
    ],
    prefill_s=0.25,
    decode_s=1.5,
    tokens=7,
    rounds={"1": 2, "5": 1},
    rows=24,
    split_s={"draft": 0.5},
    peak_bytes=12,
)
HEADER = Header(config={"target": "x"}, machine={"device": "cpu"})
RECORDS: list[Record] = [HEADER, GROUP, Failure(cell=CELL, error="no\nroom")]


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(lines), encoding="utf-8")
    return path


def test_round_trip(tmp_path: Path) -> None:
    last = HEADER.replace(peak_resident_bytes=99)
    run = read_run(write(tmp_path / "r.jsonl", *map(to_line, [*RECORDS, last])))
    assert (run.header, run.groups, run.failures) == (last, [GROUP], [RECORDS[2]])
    assert all(to_line(record).count("\n") == 1 for record in RECORDS)


@pytest.mark.parametrize("end", ["{", '{"kind": "group", "cell": ', '{"kind": "failure"}'])
def test_a_last_line_without_its_end_is_left_out(tmp_path: Path, end: str) -> None:
    run = read_run(write(tmp_path / "r.jsonl", *map(to_line, RECORDS), end))
    assert (len(run.groups), len(run.failures)) == (1, 1)


def test_a_last_line_may_end_inside_a_character(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", *map(to_line, RECORDS))
    path.write_bytes(path.read_bytes() + '{"kind": "failure", "error": "ö'.encode()[:-1])
    assert read_run(path).groups == [GROUP]


@pytest.mark.parametrize("line", ["{\n", "[]\n", '{"kind": "tea"}\n', '{"kind": "failure", "cell": {}}\n', "1\n", '{"kind": []}\n'])
def test_other_lines_are_refused_by_number(tmp_path: Path, line: str) -> None:
    with pytest.raises(JetSpecError, match="line 2"):
        read_run(write(tmp_path / "r.jsonl", to_line(RECORDS[0]), line))


def test_a_file_needs_a_header(tmp_path: Path) -> None:
    with pytest.raises(JetSpecError, match="no header"):
        read_run(write(tmp_path / "r.jsonl", to_line(GROUP)))
    with pytest.raises(JetSpecError, match="cannot read"):
        read_run(tmp_path / "missing.jsonl")


def test_labels() -> None:
    assert [CELL.label, CELL.replace(method="plain", budget=None).label] == ["jetspec auto", "plain"]


def changed(line: str, changes: dict[str, Any]) -> str:
    """A line with other values; names are paths with dots."""
    values = json.loads(line)
    for path, value in changes.items():
        *above, last = [int(part) if part.isdecimal() else part for part in path.split(".")]
        inner = values
        for part in above:
            inner = inner[part]
        inner[last] = value
    return json.dumps(values) + "\n"


#: Values that parse and that no run measures, and what the error says of each.
NONSENSE: list[tuple[dict[str, Any], str]] = [
    *(({field: -1}, f"{field}=-1: must be at least 0") for field in ("index", "tokens", "rows", "prefill_s", "decode_s")),
    *(({field: float("nan")}, "NaN is no number") for field in ("prefill_s", "decode_s", "split_s.draft")),
    *(({field: float("inf")}, "Infinity is no number") for field in ("decode_s", "cell.temperature")),
    *(({field: "7"}, f"{field}='7': must be a") for field in ("index", "tokens", "rows", "decode_s", "peak_bytes")),
    *(({field: True}, f"{field}=True: must be a") for field in ("index", "tokens", "rows", "decode_s")),
    *(({field: None}, f"{field}=None") for field in ("index", "tokens", "answers", "rounds", "split_s")),
    *(({field: 3}, f"{field}=3: must be") for field in ("answers", "rounds", "split_s", "cell")),
    ({"decode_s": 1.5, "prefil_s": 1.0}, "prefil_s: is not a field of Group; did you mean prefill_s"),
    ({"peak_bytes": -1}, "peak_bytes=-1"),
    ({"split_s.draft": -0.5}, "split_s"),
    ({"split_s.build": 0.5}, "split_s: build is none of draft"),
    ({"rows": 6}, "rows=6: must be at least the 7 tokens"),
    ({"rounds": {"1": 2, "4": 1}}, "rounds: commit 6 tokens, but tokens=7"),
    ({"rounds": {"0": 2}}, "rounds"),
    ({"rounds": {"x": 2}}, "rounds"),
    ({"rounds": {"1": 0}}, "rounds"),
    ({"rounds": {"1": -7}}, "rounds"),
    ({"rounds": {"1": 2.5}}, "rounds"),
    ({"tokens": 10, "rounds": {}}, "tokens=10: must be at most the 9 tokens of the answers"),
    ({"cell.budget": 7}, "rows=24: must be at most 7 for each of 3 forwards"),
    ({"cell.budget": 0}, "budget"),
    ({"cell.budget": "some"}, "budget"),
    ({"cell.budget": None}, "budget=None: must be a number of rows or auto for method jetspec"),
    ({"cell.method": "plain"}, "budget='auto': must be None for method plain"),
    ({"cell.method": "magic"}, "method='magic': must be one of"),
    ({"cell.dataset": ""}, "dataset"),
    ({"cell.temperature": -1}, "temperature=-1"),
    ({"cell.batch_size": 0}, "batch_size=0"),
    ({"cell.self": 0}, "self: is not a field of Cell"),
    ({"answers": []}, "answers"),
    ({"answers.0": 7}, "answers=7: must be an object"),
    ({"answers.1.turn": 0}, "answers: two are of the same turn"),
    ({"answers.0.turn": -1}, "turn=-1"),
    ({"answers.0.question": "\ud800"}, "surrogates not allowed"),
    ({"answers.0.question": 7}, "question=7: must be text"),
    ({"answers.0.token_ids.1": -2}, "token_ids.1=-2: must be at least 0"),
    ({"answers.0.token_ids.1": 0.5}, "token_ids.1=0.5: must be an integer"),
    ({"answers.0.correct": "yes"}, "correct='yes': must be True or False"),
    ({"answers.0.question": "b", "cell.batch_size": 1}, "answers: 2 questions, more than batch_size=1"),
]


@pytest.mark.parametrize(("changes", "message"), NONSENSE, ids=[str(changes) for changes, _ in NONSENSE])
def test_nonsense_is_refused_with_file_and_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "r.jsonl", to_line(HEADER), changed(to_line(GROUP), changes))
    with pytest.raises(JetSpecError, match=rf"^{re.escape(str(path))}, line 2: .*{re.escape(message)}"):
        read_run(path)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (GROUP, GROUP, "index=3: line 2 has it, too, for jetspec auto"),
        (GROUP, GROUP.replace(index=4), "question='a.+b': line 2 has it"),
        (HEADER, HEADER.replace(config={"target": "y"}), "headers of two runs"),
        (HEADER, HEADER.replace(machine={}), "headers of two runs"),
    ],
)
def test_records_that_contradict_each_other_are_refused(
    tmp_path: Path, first: Record, second: Record, message: str
) -> None:
    with pytest.raises(JetSpecError, match=message):
        read_run(write(tmp_path / "r.jsonl", *map(to_line, [HEADER, first, second])))


def test_lines_nested_too_deeply_are_refused(tmp_path: Path) -> None:
    line = '{"kind": "header", "config": ' + "[" * 100_000 + "]" * 100_000 + "}\n"
    with pytest.raises(JetSpecError, match="line 1: "):
        read_run(write(tmp_path / "r.jsonl", line))


def test_a_file_whose_name_is_not_utf_8_is_named_in_an_error_that_prints(tmp_path: Path) -> None:
    for path in (tmp_path / "r\udcff", Path("r\0")):
        with pytest.raises(JetSpecError) as caught:
            read_run(path)
        str(caught.value).encode()
