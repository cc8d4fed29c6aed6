"""Reports: the right figures in the right rows, whatever the text in them, from the records alone."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from jetspec.bench.records import Failure, Run
from jetspec.bench.report import show, write_reports
from jetspec.bench.report.html import _depths, html_report
from jetspec.bench.report.markdown import escape, markdown_report
from jetspec.bench.report.settings import cell_order, settings
from jetspec.errors import JetSpecError
from tests.helpers.bench_records import cell, markdown_tables, sample_run, write_run

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """A page's tags, tables and text; fails where tags do not close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.tables: list[list[list[str]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data


MAIN = [
    ["method", "budget", "tokens/s", "speed-up", "acceptance length", "rows", "identical", "accuracy"],
    # hf: 80 tokens in 5 s, plain: 80 in 1.5 + 2.5 s. The interval ends where one of the two groups is drawn twice.
    ["hf", "–", "16.0", "0.80× (0.60–1.00)", "–", "–", "2 of 2", "–"],
    ["plain", "–", "20.0", "1.00×", "1.00", "1.0", "–", "50.0% (2)"],
    ["ngram", "auto", "–", "–", "–", "–", "0 of 2", "–"],
    ["jetspec", "16", "40.0", "2.00× (1.50–2.50)", "2.00", "16.0", "2 of 2", "100.0% (2)"],
    # 17 forwards: 4 x 1 + 8 x 2 + 5 x 4 = 40 tokens.
    ["jetspec", "64", "50.0", "2.50× (1.88–3.12)", "2.35", "64.0", "1 of 2", "–"],
    # One group, against plain's first: 40 / 0.8 over 40 / 1.5.
    ["jetspec", "auto", "50.0", "1.88×", "2.00", "12.5", "1 of 1", "–"],
]
DEPTHS = [
    ["method", "budget", "depth 1", "depth 2", "depth 3"],
    ["jetspec", "16", "100.0%", "0.0%", "0.0%"],
    ["jetspec", "64", "76.5%", "29.4%", "29.4%"],  # 13 and 5 of 17
    ["jetspec", "auto", "100.0%", "0.0%", "0.0%"],
]
JETSPEC_TIME = ["jetspec", "64", "47.06", "20.0", "5.0", "50.0", "5.0", "10.0", "10.0", "0.50", "–"]  # 0.8 s / 17
FAILURES = [
    ["setting", "method", "groups measured", "error"],
    ["gsm8k, temperature 0, batch size 1", "eagle 16", "0 of 2", "shapes <1> & [2|3] do *not* match"],
    ["gsm8k, temperature 0, batch size 1", "jetspec auto", "1 of 2", "out of memory"],
]


def test_markdown_has_the_figures() -> None:
    text = markdown_report(sample_run())
    config, machine, main, depths, time, other, *_, failures = markdown_tables(text)
    assert ["target", "model<x>|a&b_*c*"] in config
    assert ["budgets", "16, 64, auto"] in config
    assert not any(row[0] == "draft" for row in config), "there is none"
    assert ["versions.torch", "2.13.0"] in machine
    assert ["peak resident memory", "2.50 GB"] in machine
    assert main == MAIN
    assert depths == DEPTHS
    assert time[0][2:4] == ["round (ms)", "draft (%)"]
    assert JETSPEC_TIME in time
    assert [row[-1] for row in time if row[:2] == ["jetspec", "16"]] == ["2.50"]
    assert other[1:] == [["jetspec", "32", "40.0", "–", "4.00", "32.0", "–", "–"]]
    assert failures == FAILURES


def test_markdown_escapes_what_could_be_markup() -> None:
    text = markdown_report(sample_run())
    assert text.startswith("# Benchmark of model\\<x\\>\\|a\\&b\\_\\*c\\*\n")
    assert "## a\\<b\\>\\|c \\& d.jsonl, temperature 0.7, batch size 2" in text
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1, table
    assert escape("a_b __init__ `x`\n~y~") == r"a_b \_\_init\_\_ \`x\` \~y\~"


@pytest.fixture(scope="module")
def html() -> str:
    return html_report(sample_run())


def test_html_has_the_same_figures_and_every_plot(html: str) -> None:
    page = Page(html)
    assert page.tables == markdown_tables_as_shown(markdown_report(sample_run()))
    captions = [
        "Speed-up against",
        "Acceptance length against",
        "Acceptance by depth,",
        "Time of a verify",
        "Where the",
    ]
    assert [html.count(f"<figcaption>{caption}") for caption in captions] == [1, 2, 2, 2, 2]
    labels = [
        "speed-up over plain decoding (×)",
        "(tokens per verify forward)",
        "tree budget (rows of a verify forward, log scale)",
        "depth (drafted tokens)",
        "accepted so many or more (%)",
        "mean rows of a sequence's verify forward (log scale)",
        "mean verify time (ms)",
        "time of a sequence's round (ms)",
    ]
    shown = "\n".join(page.text)
    assert [label for label in labels if label not in shown] == []
    assert "jetspec 64" in shown


def markdown_tables_as_shown(text: str) -> list[list[list[str]]]:
    # HTML keeps the line break of an error, which is shown as a space.
    return [
        [[cell.replace("[2|3] do", "[2|3]\n  do") for cell in row] for row in table] for table in markdown_tables(text)
    ]


def test_html_needs_nothing_else(html: str) -> None:
    page = Page(html)
    links = [value for _, name, value in page.attributes if name in ("href", "src", "xlink:href", "data", "action")]
    assert links
    assert all(link.startswith("#") for link in links)
    assert not re.search(r"<(script|link|iframe|img|object|embed)\b|@import|url\((?!#)", html)
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in links} <= set(ids)
    assert set(re.findall(r"url\(#([^)]+)\)", html)) <= set(ids)
    assert "#010203" not in html
    assert "prefers-color-scheme: dark" in html


def test_html_escapes_all_text(html: str) -> None:
    assert "model<x>" not in html
    assert "model&lt;x&gt;|a&amp;b_*c*" in html
    assert "shapes &lt;1&gt; &amp; [2|3]" in html
    assert "a&lt;b&gt;|c &amp; d.jsonl" in html


def test_reports_are_written_from_the_folder_and_always_the_same(tmp_path: Path, html: str) -> None:
    write_run(sample_run(), tmp_path / "results.jsonl")
    paths = write_reports(tmp_path)
    assert paths == [tmp_path / "report.md", tmp_path / "report.html"]
    first = [path.read_bytes() for path in paths]
    assert first[0].decode() == markdown_report(sample_run())
    assert first[1].decode() == html


def test_no_results_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(JetSpecError, match="results"):
        write_reports(tmp_path)


def test_a_run_without_groups_is_reported() -> None:
    run = Run(sample_run().header, [], [Failure(cell=cell("plain"), error="no memory")])
    assert markdown_tables(markdown_report(run))[-1][1][-2:] == ["0 of 0", "no memory"]
    assert Page(html_report(run)).tables[-1][1][-2:] == ["0 of 0", "no memory"]


def test_a_run_without_target_or_failures_is_reported() -> None:
    run = sample_run()
    run = replace(run, header=run.header.replace(config={}), groups=run.groups[-1:], failures=[])
    assert markdown_report(run).startswith("# Benchmark\n")
    assert "Failures" not in markdown_report(run)
    assert "Failures" not in html_report(run)


@pytest.mark.parametrize("width", [100, 140])
def test_terminal_shows_the_main_tables(width: int) -> None:
    console = Console(width=width, record=True, color_system=None)
    with console.capture() as capture:
        show(sample_run(), console)
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= width
    assert "a<b>|c & d.jsonl, temperature 0.7, batch size 2" in lines
    shown = [re.split(r" {2,}", line.strip()) for line in lines]
    assert [row for row in MAIN[1:] if row not in shown] == []
    assert "…" not in capture.get()
    text = " ".join(capture.get().split())
    assert "failed: eagle 16, gsm8k, temperature 0, batch size 1 (0 of 2 groups measured): shapes <1> & [2|3]" in text
    assert "(1 of 2 groups measured): out of memory" in text
    assert "first try" not in text


def test_cells_come_by_method_and_budget_settings_as_measured() -> None:
    run = sample_run()
    found = settings(replace(run, groups=run.groups[::-1]))
    assert [setting.dataset for setting in found] == ["a<b>|c & d.jsonl", "gsm8k"]
    labels = [entry.cell.label for entry in list(found.values())[1]]
    assert labels == ["hf", "plain", "ngram auto", "jetspec 16", "jetspec 64", "jetspec auto"]
    assert cell_order(cell("hf")) < cell_order(cell("jetspec", 1))


def test_seconds_of_a_round() -> None:
    entries = next(iter(settings(sample_run()).values()))
    by_label = {entry.cell.label: entry.round_s for entry in entries}
    assert by_label["hf"] == {}
    assert by_label["ngram auto"] == {}
    assert by_label["jetspec 16"]["verify"] == pytest.approx(0.5 * 2.0 / 40)
    assert sum(by_label["jetspec 16"].values()) == pytest.approx(2.0 / 40)


def test_depths_are_plotted_for_the_largest_budget_of_a_method() -> None:
    gsm8k = next(iter(settings(sample_run()).values()))
    assert _depths(gsm8k) == {"jetspec 64": pytest.approx([13 / 17, 5 / 17, 5 / 17])}
    assert list(_depths([entry for entry in gsm8k if entry.cell.budget == "auto"])) == ["jetspec auto"]
