"""A run's report as one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jetspec.bench.metrics import CONFIDENCE
from jetspec.bench.records import Run
from jetspec.bench.report import plots
from jetspec.bench.report.settings import Entry, Setting, settings
from jetspec.bench.report.tables import (
    DEFINITIONS,
    Table,
    depth_table,
    failure_table,
    header_tables,
    main_table,
    time_table,
    title,
)
from jetspec.errors import JetSpecError

_TEMPLATE = Path(__file__).with_name("report.html.j2")


def html_report(run: Run) -> str:
    """The tables of the Markdown report, and plots of every setting.

    Raises:
        JetSpecError: jinja2 or matplotlib is missing.
    """
    sections = [
        {"title": setting.title, "tables": list(_tables(entries)), "plots": list(_plots(setting, entries))}
        for setting, entries in settings(run).items()
    ]
    return page(
        title=title(run.header),
        header=header_tables(run.header),
        definitions=DEFINITIONS,
        sections=sections,
        failures=failure_table(run),
    )


def page(
    *,
    title: str,
    header: Mapping[str, Table],
    definitions: str,
    sections: Sequence[Mapping[str, Any]],
    failures: Table | None = None,
) -> str:
    """A report as one page.

    Args:
        title: of the page.
        header: tables about the run as a whole, by their names.
        definitions: what the columns mean.
        sections: each with a ``title``, ``tables`` (heading or None, table) and ``plots`` (caption, SVG).
        failures: what could not be measured.

    Raises:
        JetSpecError: jinja2 is missing.
    """
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise JetSpecError("HTML reports need jinja2: pip install 'jetspec[bench]'") from error
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        title=title, header=header, definitions=definitions, sections=sections, failures=failures
    )


def _tables(entries: Sequence[Entry]) -> Iterator[tuple[str | None, Table]]:
    """Headings and tables of a setting."""
    yield None, main_table(entries)
    if (depths := depth_table(entries)) is not None:
        yield "Acceptance by depth", depths
    yield "Time", time_table(entries)


def _plots(setting: Setting, entries: Sequence[Entry]) -> Iterator[tuple[str, str]]:
    """Captions and SVG of those plots that have something to show."""

    def plot(draw: Callable[..., str], data: dict[str, Any], caption: str, **labels: str) -> Iterator[tuple[str, str]]:
        if data:
            yield caption, draw(data, title=f"{caption}: {setting.title}", **labels)

    interval = f"Speed-up against tree budget, with {CONFIDENCE:.0%} intervals"
    yield from plot(plots.against_budget, _speedups(entries), interval, label="speed-up over plain decoding (×)")
    length = "acceptance length\n(tokens per verify forward)"
    yield from plot(plots.against_budget, _lengths(entries), "Acceptance length against tree budget", label=length)
    yield from plot(plots.by_depth, _depths(entries), "Acceptance by depth, each method at its largest budget")
    yield from plot(plots.verify_time, _verify_times(entries), "Time of a verify forward against its rows")
    rounds = {entry.cell.label: entry.round_s for entry in entries if entry.round_s}
    yield from plot(plots.round_time, rounds, "Where the time of a round goes")


def _speedups(entries: Sequence[Entry]) -> dict[str, dict[plots.Budget, plots.Estimate]]:
    found: dict[str, dict[plots.Budget, plots.Estimate]] = {}
    for entry in entries:
        if entry.figures.speedup is not None:
            estimate = entry.figures.speedup, entry.figures.speedup_interval
            found.setdefault(entry.cell.method, {})[entry.cell.budget] = estimate
    return found


def _lengths(entries: Sequence[Entry]) -> dict[str, dict[plots.Budget, plots.Estimate]]:
    found: dict[str, dict[plots.Budget, plots.Estimate]] = {}
    for entry in entries:
        if entry.figures.acceptance_length is not None:
            found.setdefault(entry.cell.method, {})[entry.cell.budget] = entry.figures.acceptance_length, None
    return found


def _depths(entries: Sequence[Entry]) -> dict[str, list[float]]:
    """One cell a method, that of the largest budget given as a number: a line for each budget could not be read."""
    largest: dict[str, Entry] = {}
    for entry in entries:
        if entry.figures.depths and (entry.cell.budget != "auto" or entry.cell.method not in largest):
            largest[entry.cell.method] = entry
    return {entry.cell.label: entry.figures.depths for entry in largest.values()}


def _verify_times(entries: Sequence[Entry]) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for entry in entries:
        if entry.figures.rows is not None and entry.round_s:
            found.setdefault(entry.cell.method, []).append((entry.figures.rows, entry.round_s["verify"]))
    return found
