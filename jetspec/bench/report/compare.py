"""Runs side by side."""

from __future__ import annotations

from collections.abc import Sequence

from jetspec.bench.metrics import Figures, figures, groups_by_cell
from jetspec.bench.metrics import speedup as ratio_of
from jetspec.bench.metrics import speedup_interval as interval_of
from jetspec.bench.records import Cell, Group, Header, Run
from jetspec.bench.report.markdown import escape, markdown_table
from jetspec.bench.report.settings import Setting, cell_order
from jetspec.bench.report.tables import NOTHING, Table, accuracy, flat, names_of, number, rate, speedup, times
from jetspec.errors import JetSpecError

_ABOUT = (
    "Speed-up is over plain decoding of the same run, with its interval. The ratio of tokens/s, with its interval, is "
    "over the groups whose questions both runs answered."
)


def compare(runs: list[tuple[str, Run]]) -> str:
    """Markdown: what differs between named runs, then the cells that two or more of them measured, run below run.

    Raises:
        JetSpecError: fewer than two runs, or no cell that two of them measured.
    """
    if len(runs) < 2:
        raise JetSpecError("a comparison needs at least two runs; name another folder")
    measured = [{f.cell: f for f in figures(run)} for _, run in runs]
    cells = list(dict.fromkeys(cell for found in measured for cell in found))
    shared = [cell for cell in cells if sum(cell in found for found in measured) > 1]
    if not shared:
        raise JetSpecError(
            f"nothing to compare in {', '.join(name for name, _ in runs)}: no two of them measured the same data set, "
            "method, budget, temperature and batch size"
        )
    groups = [groups_by_cell(run) for _, run in runs]
    blocks = [
        f"# Comparison of {' and '.join(escape(name) for name, _ in runs)}",
        *differences([(name, run.header) for name, run in runs]),
        _ABOUT,
    ]
    for setting in dict.fromkeys(map(Setting.of, shared)):
        rows = [
            [*names_of(cell), name, *_row(found[cell], groups[0].get(cell, []), done[cell])]
            for cell in sorted((c for c in shared if Setting.of(c) == setting), key=cell_order)
            for (name, _), found, done in zip(runs, measured, groups)
            if cell in found
        ]
        columns = ["method", "budget", "run", "speed-up", "tokens/s", f"over {runs[0][0]}"]
        table = Table([*columns, "acceptance length", "accuracy"], rows, names=3)
        blocks += [f"## {escape(setting.title)}", markdown_table(table)]
    return "\n\n".join([*blocks, *_alone(runs, measured, set(shared))]) + "\n"


def differences(headers: Sequence[tuple[str, Header]]) -> list[str]:
    """Blocks of Markdown that say how the configurations and machines of named runs differ."""
    values = [{**flat(header.config), **flat(header.machine, "machine.")} for _, header in headers]
    keys = dict.fromkeys(key for found in values for key in found)
    rows = [[key, *(found.get(key, NOTHING) for found in values)] for key in keys]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    if not rows:
        return ["Configurations and machines are the same."]
    table = Table(["setting", *(name for name, _ in headers)], rows, names=1 + len(headers))
    return ["Configurations and machines differ in:", markdown_table(table)]


def _row(found: Figures, first: Sequence[Group], groups: Sequence[Group]) -> list[str]:
    known = {_questions(group): group for group in first}
    pairs = [(group, known[_questions(group)]) for group in groups if _questions(group) in known]
    return [speedup(found), rate(found), _ratio(pairs), number(found.acceptance_length, 2), accuracy(found)]


def _ratio(pairs: Sequence[tuple[Group, Group]]) -> str:
    if not any(group.tokens for group, _ in pairs) or not any(base.tokens for _, base in pairs):
        return NOTHING
    with_itself = all(group is base for group, base in pairs)
    return times(ratio_of(pairs), None if with_itself or len(pairs) < 2 else interval_of(pairs))


def _questions(group: Group) -> tuple[tuple[str, int], ...]:
    return tuple((answer.question, answer.turn) for answer in group.answers)


def _alone(runs: list[tuple[str, Run]], measured: list[dict[Cell, Figures]], shared: set[Cell]) -> list[str]:
    rows = [
        [name, Setting.of(cell).title, *names_of(cell)]
        for (name, _), found in zip(runs, measured)
        for cell in found
        if cell not in shared
    ]
    table = Table(["run", "setting", "method", "budget"], rows, names=4)
    return ["## Measured by one run only", markdown_table(table)] if rows else []
