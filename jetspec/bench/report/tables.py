"""The tables of a report, as text without markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jetspec.bench.metrics import CONFIDENCE, Figures, groups_by_cell
from jetspec.bench.records import PARTS, Cell, Failure, Header, Run
from jetspec.bench.report.settings import Entry, Setting
from jetspec.bench.results import flat as flat_values

NOTHING = "–"

#: What the columns mean.
DEFINITIONS = (
    "Tokens/s: tokens over the time of decoding; reading prompts is left out. Speed-up: tokens/s over those of plain "
    f"decoding on the same groups of questions, with a {CONFIDENCE:.0%} bootstrap interval over the groups. Acceptance "
    "length: tokens that a sequence's verify forward commits, bonus included. Rows: rows of such a forward, 1 where "
    "nothing is drafted. Identical: answers with the same tokens as plain decoding's, of those that can be compared. "
    "Accuracy: share of the answers that solve their task, with the number scored. Depth d: share of the verify "
    "forwards that accepted at least d drafted tokens. A round is one verify forward and all around it; sequences that "
    f"share a forward share its time. {NOTHING}: does not apply, or was not measured."
)


@dataclass(frozen=True)
class Table:
    """Rows of text under `columns`. The first `names` columns hold words, the others numbers."""

    columns: list[str]
    rows: list[list[str]]
    names: int


def main_table(entries: Sequence[Entry]) -> Table:
    """Speed, acceptance and correctness of every cell."""
    columns = ["tokens/s", "speed-up", "acceptance length", "rows", "identical", "accuracy"]
    return _cells(columns, [(e.cell, _main_row(e.figures)) for e in entries])


def _main_row(figures: Figures) -> list[str]:
    return [
        rate(figures),
        speedup(figures),
        number(figures.acceptance_length, 2),
        number(figures.rows, 1),
        NOTHING if figures.identical is None else f"{figures.identical} of {figures.compared}",
        accuracy(figures),
    ]


def depth_table(entries: Sequence[Entry]) -> Table | None:
    """Share of the verify forwards by accepted depth; None if nothing was drafted."""
    drafting = [e for e in entries if e.figures.depths]
    if not drafting:
        return None
    deepest = max(len(e.figures.depths) for e in drafting)
    rows = [(e.cell, [percent(share) for share in e.figures.depths]) for e in drafting]
    return _cells(
        [f"depth {d}" for d in range(1, deepest + 1)],
        [(cell, shares + [percent(0.0)] * (deepest - len(shares))) for cell, shares in rows],
    )


def time_table(entries: Sequence[Entry]) -> Table:
    """Where the time goes: a round and its parts, and prompts; memory where it was measured."""
    with_memory = any(e.figures.peak_bytes is not None for e in entries)
    columns = ["round (ms)", *(f"{part} (%)" for part in PARTS), "prefill (s)", *["peak memory (GB)"] * with_memory]
    return _cells(columns, [(e.cell, _time_row(e, with_memory)) for e in entries])


def _time_row(entry: Entry, with_memory: bool) -> list[str]:
    whole = sum(entry.round_s.values())
    peak = entry.figures.peak_bytes
    return [
        number(1e3 * whole, 2) if whole else NOTHING,
        *(number(100 * entry.round_s[part] / whole, 1) if whole else NOTHING for part in PARTS),
        number(entry.figures.prefill_s, 2),
        *[number(None if peak is None else peak / 1e9, 2)] * with_memory,
    ]


def failure_table(run: Run) -> Table | None:
    """The last error of every cell that failed, and how much of it was measured; None if there was none."""
    done = {cell: len(groups) for cell, groups in groups_by_cell(run).items()}
    last: dict[Cell, Failure] = {failure.cell: failure for failure in run.failures}
    rows = []
    for cell, failure in last.items():
        setting = Setting.of(cell)
        most = max((count for other, count in done.items() if Setting.of(other) == setting), default=0)
        rows.append([setting.title, cell.label, f"{done.get(cell, 0)} of {most}", failure.error])
    return Table(["setting", "method", "groups measured", "error"], rows, names=4) if rows else None


def title(header: Header) -> str:
    """The title of a report."""
    return f"Benchmark of {header.config['target']}" if "target" in header.config else "Benchmark"


def header_tables(header: Header) -> dict[str, Table]:
    """The run's configuration and machine; settings without a value are left out."""
    machine = dict(header.machine)
    if header.peak_resident_bytes is not None:
        machine["peak resident memory"] = f"{header.peak_resident_bytes / 1e9:.2f} GB"
    return {
        name: Table(["setting", "value"], [[key, value] for key, value in flat(values).items() if value != NOTHING], 2)
        for name, values in (("Configuration", header.config), ("Machine", machine))
    }


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Settings as text, nested ones under names with dots."""
    return {name: _text(value) for name, value in flat_values(values, prefix).items()}


def _text(value: Any) -> str:
    if value is None or value == [] or value == ():
        return NOTHING
    return ", ".join(map(_text, value)) if isinstance(value, list | tuple) else str(value)


def names_of(cell: Cell) -> list[str]:
    """Method and budget, as the first columns show them."""
    return [cell.method, NOTHING if cell.budget is None else str(cell.budget)]


def _cells(columns: list[str], rows: Iterable[tuple[Cell, list[str]]]) -> Table:
    return Table(["method", "budget", *columns], [names_of(cell) + values for cell, values in rows], names=2)


def rate(figures: Figures) -> str:
    """Tokens a second."""
    return number(figures.tokens_per_s, 1)


def speedup(figures: Figures) -> str:
    """The speed-up and its interval."""
    return times(figures.speedup, figures.speedup_interval)


def accuracy(figures: Figures) -> str:
    """The accuracy and the number of scored answers, as in 50.0% (2)."""
    return NOTHING if figures.accuracy is None else f"{percent(figures.accuracy)} ({figures.scored})"


def times(ratio: float | None, interval: tuple[float, float] | None) -> str:
    """A ratio and its interval, as in 1.83× (1.70–1.95)."""
    if ratio is None:
        return NOTHING
    return f"{ratio:.2f}×" + ("" if interval is None else f" ({interval[0]:.2f}–{interval[1]:.2f})")


def percent(share: float) -> str:
    """A share, as in 12.5%."""
    return f"{share:.1%}"


def number(value: float | None, digits: int) -> str:
    """A number with this many digits after the point."""
    return NOTHING if value is None else f"{value:.{digits}f}"
