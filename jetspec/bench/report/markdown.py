"""A run's report as Markdown."""

from __future__ import annotations

import re

from jetspec.bench.records import Run
from jetspec.bench.report.settings import settings
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

#: What Markdown or HTML would take for markup. An underscore inside a word is none.
_MARKUP = re.compile(r"[\\`*\[\]<>&|~]|(?<![^\W_])_|_(?![^\W_])")


def markdown_report(run: Run) -> str:
    """Configuration, machine, the tables of every setting, and what failed."""
    blocks = [f"# {escape(title(run.header))}"]
    for name, table in header_tables(run.header).items():
        blocks += [f"{name}:", markdown_table(table)]
    blocks.append(escape(DEFINITIONS))
    for setting, entries in settings(run).items():
        blocks += [f"## {escape(setting.title)}", markdown_table(main_table(entries))]
        depths = depth_table(entries)
        if depths is not None:
            blocks += ["### Acceptance by depth", markdown_table(depths)]
        blocks += ["### Time", markdown_table(time_table(entries))]
    failures = failure_table(run)
    if failures is not None:
        blocks += ["## Failures", markdown_table(failures)]
    return "\n\n".join(blocks) + "\n"


def markdown_table(table: Table) -> str:
    """A table whose columns of numbers are aligned to the right."""
    rule = ["---"] * table.names + ["---:"] * (len(table.columns) - table.names)
    columns, *rows = [list(map(escape, row)) for row in [table.columns, *table.rows]]
    return "\n".join(f"| {' | '.join(row)} |" for row in [columns, rule, *rows])


def escape(text: str) -> str:
    """Any text as one line of Markdown that shows it as it is."""
    return _MARKUP.sub(r"\\\g<0>", " ".join(text.split()))
