"""Records of load tests as files, and what reports make of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jetspec.bench.serve.figures import figures
from jetspec.bench.serve.records import LEVELS, LoadTest, read_load_test, to_line
from jetspec.bench.serve.report import compare, html_report, markdown_report, show, write_reports
from jetspec.errors import JetSpecError
from tests.helpers.load_tests import sample_load_test


@pytest.fixture
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots take time."""
    monkeypatch.setattr("jetspec.bench.report.plots.against_rate", lambda lines, **labels: f"<svg>{lines}</svg>")


def written(folder: Path, test: LoadTest) -> Path:
    path = folder / LEVELS
    path.write_text("".join([to_line(test.header), *map(to_line, test.levels)]))
    return path


def rows(markdown: str, heading: str) -> list[list[str]]:
    """The rows of the first table after a heading, without its two lines of head."""
    part = markdown.split(f"## {heading}", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    test = sample_load_test()
    path = written(tmp_path, test)
    assert read_load_test(path) == test
    with path.open("a") as file:
        file.write('{"kind": "level", "ra')
    assert read_load_test(path) == test, "a line that was cut off is left out"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"error": "timeout", "end_s": 0.5}, "end_s=0.5: must be at least last_token_s=1.1"),
        ({"sent_s": -1.0}, "sent_s=-1.0"),
        ({"sent_s": 0.6, "arrival_s": 0.7}, "sent_s=0.6: must be at least arrival_s=0.7"),
        ({"first_token_s": None}, "first_token_s: is required of a request without an error"),
        ({"completion_tokens": None}, "completion_tokens: is required"),
        ({"completion_tokens": -1}, "completion_tokens=-1"),
        ({"colour": 1}, "colour: is not a field"),
    ],
)
def test_requests_that_cannot_be_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    test = sample_load_test()
    level = json.loads(to_line(test.levels[1]))
    level["requests"][0].update(change)
    path = tmp_path / LEVELS
    path.write_text(to_line(test.header) + json.dumps(level) + "\n")
    with pytest.raises(JetSpecError, match=re.escape(message)) as error:
        read_load_test(path)
    assert "levels.jsonl, line 2" in str(error.value)


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    test = sample_load_test()
    header, level = to_line(test.header), to_line(test.levels[0])
    for text, message in {
        "": "does not start with a header",
        level: "does not start with a header",
        header + header: "two headers",
        header + level + level: "two levels of one rate",
        header + '{"kind": "group"}\n': "kind: must be one of header, level",
        header + "[]\n": "must be an object",
        header + '{"kind": "level", "rate": NaN, "requests": []}\n': "NaN is no number",
    }.items():
        (tmp_path / LEVELS).write_text(text)
        with pytest.raises(JetSpecError, match=message):
            read_load_test(tmp_path / LEVELS)
    with pytest.raises(JetSpecError, match="cannot read benchmark results"):
        read_load_test(tmp_path / "nothing")


def test_the_markdown_report_has_the_figures_by_rising_rate() -> None:
    markdown = markdown_report(sample_load_test())
    latency = rows(markdown, "Latency (ms)")
    assert latency[0] == ["1", "TTFT", "150.0", "150.0", "195.0", "199.0"]
    assert latency[1] == ["1", "TPOT", "100.0", "100.0", "100.0", "100.0"]
    assert latency[2] == ["1", "E2E", "1150.0", "1150.0", "1195.0", "1199.0"]
    assert [row[0] for row in latency] == ["1"] * 3 + ["4"] * 3
    slow, fast = rows(markdown, "Throughput (objectives: TTFT 150 ms)")
    assert slow == ["1", "2", "0", "1", "0.62", "6.9", "0.31 (50.0%)", "2.50"]
    assert fast == ["4", "3", "1", "2", "0.83", "9.2", "0.00 (0.0%)", "–"]
    assert rows(markdown, "Errors") == [["4", "HTTP 503", "1"]]
    assert "| cpu | abacus |" in markdown


def test_what_does_not_apply_is_left_out() -> None:
    test = sample_load_test(slo_ttft_ms=None)
    test = LoadTest(test.header, test.levels[1:])
    markdown = markdown_report(test)
    assert rows(markdown, "Throughput")[0][6] == "–"
    assert "Errors" not in markdown
    assert "objectives:" not in markdown.split("## Latency")[1]


@pytest.mark.usefixtures("without_plots")
def test_a_level_that_failed_as_a_whole_has_no_times() -> None:
    test = sample_load_test()
    failed = [request for request in test.levels[0].requests if request.error is not None]
    test = LoadTest(test.header, [test.levels[0].replace(requests=failed)])
    [level] = figures(test)
    assert (level.times, level.completed) == ({}, 0)
    assert "Requests answered" in html_report(test)
    assert rows(markdown_report(test), "Latency (ms)") == []


def test_the_html_report_has_tables_and_plots(tmp_path: Path) -> None:
    test = sample_load_test()
    written(tmp_path, test)
    paths = write_reports(tmp_path)
    assert [path.name for path in paths] == ["report.md", "report.html"]
    page = paths[1].read_text()
    for caption in ("TTFT", "TPOT", "E2E", "Requests answered", "Output tokens"):
        assert f"<figcaption>{caption} against the rate</figcaption>" in page
    assert page.count("<svg") == 5
    assert "<td>HTTP 503</td>" in page
    assert "goodput</text>" in page


def test_the_terminal_fits_100_columns() -> None:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    show(sample_load_test(), console)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 100
    assert "acceptance length" in text
    assert "HTTP 503" in text


def test_tests_side_by_side() -> None:
    first, second = sample_load_test(), sample_load_test(factor=2.0, model="other")
    second = LoadTest(second.header, [second.levels[1], second.levels[0].replace(rate=8.0)])
    markdown = compare([("a", first), ("b", second)])
    assert "| model | tiny | other |" in markdown
    assert [row[:4] for row in rows(markdown, "Latency")[:6:3]] == [
        ["1", "a", "TTFT", "150.0"],
        ["1", "b", "TTFT", "300.0"],
    ]
    assert [row[:2] for row in rows(markdown, "Throughput")] == [["1", "a"], ["1", "b"]]
    with pytest.raises(JetSpecError, match="no two tests share a rate"):
        compare([("a", LoadTest(first.header, first.levels[:1])), ("b", second)])


@pytest.mark.usefixtures("without_plots")
def test_names_are_shown_as_they_are() -> None:
    assert "evil\\*model" in markdown_report(sample_load_test(model="evil*model"))
    assert "<b>evil</b>" not in html_report(sample_load_test(model="<b>evil</b>"))
