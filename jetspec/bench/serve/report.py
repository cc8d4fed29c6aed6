"""Reports about load tests: in the terminal, as Markdown, as one HTML page; and several tests side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from jetspec.bench.report.compare import differences
from jetspec.bench.report.html import page
from jetspec.bench.report.markdown import escape, markdown_table
from jetspec.bench.report.tables import NOTHING, Table, header_tables, number, percent
from jetspec.bench.report.terminal import rich_table
from jetspec.bench.serve.figures import TIMES, LevelFigures, Objectives, figures
from jetspec.bench.serve.records import LEVELS, LoadTest, read_load_test
from jetspec.errors import JetSpecError

#: What the columns mean.
DEFINITIONS = (
    "Rate: mean requests a second, sent at random times (a Poisson process) whatever the server does. TTFT: time from "
    "the arrival of a request to its first text. TPOT: time per output token after the first, over one answer. E2E: "
    "time from arrival to the last token. All in milliseconds, over the requests that were answered; p50, p95 and p99 "
    "are percentiles over requests. Running: most requests at a time. Goodput: answered requests a second that met "
    "every objective, and their share of all that were sent. Acceptance length: tokens per verify forward, where the "
    f"server reports it. {NOTHING}: does not apply, or is not known."
)


def write_reports(folder: Path) -> list[Path]:
    """Write `report.md` and `report.html` into the folder of a load test. Returns their paths.

    Raises:
        JetSpecError: the records cannot be read, or matplotlib is missing.
    """
    test = read_load_test(folder / LEVELS)
    paths = []
    for name, render in (("report.md", markdown_report), ("report.html", html_report)):
        paths.append(folder / name)
        paths[-1].write_text(render(test), encoding="utf-8")
    return paths


def show(test: LoadTest, console: Console) -> None:
    """Print the tables. Fits 100 columns."""
    for name, table in tables(test).items():
        console.print(Text(name, style="bold"))
        console.print(rich_table(table))


def markdown_report(test: LoadTest) -> str:
    """Configuration, machine and all tables."""
    blocks = [f"# {escape(title(test))}"]
    for name, table in header_tables(test.header).items():
        blocks += [f"{name}:", markdown_table(table)]
    blocks.append(escape(DEFINITIONS))
    for name, table in tables(test).items():
        blocks += [f"## {name}", markdown_table(table)]
    return "\n\n".join(blocks) + "\n"


def html_report(test: LoadTest) -> str:
    """The tables of the Markdown report, and plots against the rate. JetSpecError if matplotlib is missing."""
    sections = [{"title": name, "tables": [(None, table)], "plots": []} for name, table in tables(test).items()]
    sections[0]["plots"] = _latency_plots(figures(test))
    sections[1]["plots"] = _throughput_plots(figures(test))
    return page(title=title(test), header=header_tables(test.header), definitions=DEFINITIONS, sections=sections)


def compare(tests: Sequence[tuple[str, LoadTest]]) -> str:
    """Markdown: what differs between named load tests, then their figures, one below the other.

    Raises:
        JetSpecError: no rate that two of them measured.
    """
    found = [{level.rate: level for level in figures(test)} for _, test in tests]
    rates = sorted({rate for levels in found for rate in levels if sum(rate in other for other in found) > 1})
    if not rates:
        raise JetSpecError(f"nothing to compare in {', '.join(name for name, _ in tests)}: no two tests share a rate")
    blocks = [f"# Comparison of {' and '.join(escape(name) for name, _ in tests)}"]
    blocks += [*differences([(name, test.header) for name, test in tests]), escape(DEFINITIONS)]
    for name, columns, rows in (
        ("Latency", _LATENCY, _latency_rows),
        ("Throughput", _THROUGHPUT, _throughput_rows),
    ):
        body = [
            [row[0], test, *row[1:]]
            for rate in rates
            for (test, _), levels in zip(tests, found)
            if rate in levels
            for row in rows(levels[rate])
        ]
        names = 3 if name == "Latency" else 2
        blocks += [f"## {name}", markdown_table(Table([columns[0], "run", *columns[1:]], body, names=names))]
    return "\n\n".join(blocks) + "\n"


def title(test: LoadTest) -> str:
    """The title of a report."""
    return f"Load test of {test.header.config.get('model')} at {test.header.config.get('url')}"


def tables(test: LoadTest) -> dict[str, Table]:
    """The tables of a report by their headings; the last is left out if nothing failed."""
    levels = figures(test)
    objectives = ", ".join(f"{name} {limit:g} ms" for name, limit in Objectives.of(test.header.config).limits.items())
    throughput = "Throughput" + (f" (objectives: {objectives})" if objectives else "")
    errors = [[_rate(level), cause, str(n)] for level in levels for cause, n in level.errors.items()]
    found = {
        "Latency (ms)": Table(_LATENCY, [row for level in levels for row in _latency_rows(level)], names=2),
        throughput: Table(_THROUGHPUT, [row for level in levels for row in _throughput_rows(level)], names=1),
    }
    return {**found, "Errors": Table(["rate", "cause", "requests"], errors, names=2)} if errors else found


_LATENCY = ["rate", "time", "mean", "p50", "p95", "p99"]
_THROUGHPUT = ["rate", "requests", "failed", "running", "requests/s", "tokens/s", "goodput", "acceptance length"]


def _rate(level: LevelFigures) -> str:
    return f"{level.rate:g}"


def _latency_rows(level: LevelFigures) -> list[list[str]]:
    return [
        [_rate(level), name, *(number(value, 1) for value in level.times[name].model_dump().values())]
        for name in TIMES
        if name in level.times
    ]


def _throughput_rows(level: LevelFigures) -> list[list[str]]:
    goodput = NOTHING
    if level.goodput is not None and level.good is not None:
        goodput = f"{level.goodput:.2f} ({percent(level.good)})"
    row = [
        _rate(level),
        str(level.requests),
        str(level.requests - level.completed),
        str(level.peak_running),
        number(level.requests_per_s, 2),
        number(level.completion_tokens_per_s, 1),
        goodput,
        number(level.acceptance_length, 2),
    ]
    return [row]


def _latency_plots(levels: Sequence[LevelFigures]) -> list[tuple[str, str]]:
    drawn = []
    for name in TIMES:
        having = [level for level in levels if name in level.times]
        lines = {
            part: [(level.rate, float(getattr(level.times[name], part))) for level in having]
            for part in ("p50", "p95", "p99")
        }
        if having:
            drawn.append(_plot(f"{name} against the rate", lines, f"{name} (ms)"))
    return drawn


def _throughput_plots(levels: Sequence[LevelFigures]) -> list[tuple[str, str]]:
    lines = {"answered": [(level.rate, level.requests_per_s) for level in levels]}
    good = [(level.rate, level.goodput) for level in levels if level.goodput is not None]
    drawn = [_plot("Requests answered against the rate", {**lines, "goodput": good} if good else lines, "requests/s")]
    tokens = {"tokens": [(level.rate, level.completion_tokens_per_s) for level in levels]}
    return [*drawn, _plot("Output tokens against the rate", tokens, "tokens/s")]


def _plot(caption: str, lines: dict[str, list[tuple[float, float]]], label: str) -> tuple[str, str]:
    from jetspec.bench.report.plots import against_rate

    draw: Callable[..., str] = against_rate
    return caption, draw(lines, title=caption, label=label)
