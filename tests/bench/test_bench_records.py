"""Records survive the file, and a file that was cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from jetspec.bench.records import Answer, Cell, Failure, Group, Header, Record, read_run, to_line
from jetspec.errors import JetSpecError

CELL = Cell("gsm8k", "jetspec", "auto", 0.7, 4)
GROUP = Group(
    CELL,
    3,
    [Answer("a\u2028b", 0, [1, 2], "stop", True), Answer("a\u2028b", 1, [], "length")],
    prefill_s=0.25,
    decode_s=1.5,
    tokens=7,
    rounds={"1": 2, "5": 1},
    rows=24,
    split_s={"draft": 0.5},
    peak_bytes=12,
)
RECORDS: list[Record] = [Header({"target": "x"}, {"device": "cpu"}), GROUP, Failure(CELL, "no\nroom")]


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(lines), encoding="utf-8")
    return path


def test_round_trip(tmp_path: Path) -> None:
    last = Header({"target": "x"}, {"device": "cpu"}, 99)
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


@pytest.mark.parametrize("line", ["{\n", "[]\n", '{"kind": "tea"}\n', '{"kind": "failure", "cell": {}}\n', "1\n"])
def test_other_lines_are_refused_by_number(tmp_path: Path, line: str) -> None:
    with pytest.raises(JetSpecError, match="line 2"):
        read_run(write(tmp_path / "r.jsonl", to_line(RECORDS[0]), line))


def test_a_file_needs_a_header(tmp_path: Path) -> None:
    with pytest.raises(JetSpecError, match="no header"):
        read_run(write(tmp_path / "r.jsonl", to_line(GROUP)))
    with pytest.raises(JetSpecError, match="cannot read"):
        read_run(tmp_path / "missing.jsonl")


def test_labels() -> None:
    assert [CELL.label, Cell("x", "plain", None, 0.0, 1).label] == ["jetspec auto", "plain"]
