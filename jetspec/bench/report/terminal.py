"""A run's main tables in the terminal."""

from __future__ import annotations

import rich.table
from rich import box
from rich.console import Console
from rich.text import Text

from jetspec.bench.records import Run
from jetspec.bench.report.settings import settings
from jetspec.bench.report.tables import Table, failure_table, main_table


def show(run: Run, console: Console) -> None:
    """Print the main table of every setting, and what failed. Fits 100 columns."""
    for setting, entries in settings(run).items():
        console.print(Text(setting.title, style="bold"))
        console.print(rich_table(main_table(entries)))
    failures = failure_table(run)
    for setting_title, method, measured, error in failures.rows if failures is not None else []:
        console.print(Text(f"failed: {method}, {setting_title} ({measured} groups measured): {error}", style="red"))


def rich_table(table: Table) -> rich.table.Table:
    """A table as rich prints it, numbers aligned to the right."""
    grid = rich.table.Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(table.columns):
        grid.add_column(column, justify="left" if number < table.names else "right", overflow="fold")
    for row in table.rows:
        grid.add_row(*row)
    return grid
