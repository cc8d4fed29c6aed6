"""The cells of a run, grouped by data set, temperature and batch size, as reports show them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from jetspec.bench.metrics import Figures, figures, groups_by_cell
from jetspec.bench.records import METHODS, PARTS, Cell, Group, Run


@dataclass(frozen=True)
class Setting:
    """The data set, temperature and batch size that the cells of one table share."""

    dataset: str
    temperature: float
    batch_size: int

    @classmethod
    def of(cls, cell: Cell) -> Setting:
        """The setting of a cell."""
        return cls(cell.dataset, cell.temperature, cell.batch_size)

    @property
    def title(self) -> str:
        """The setting in words."""
        return f"{self.dataset}, temperature {self.temperature:g}, batch size {self.batch_size}"


@dataclass(frozen=True)
class Entry:
    """The figures of a cell, and the parts of a round."""

    figures: Figures
    #: Seconds of a sequence's round by part. With several sequences in a forward, each counts its share.
    round_s: dict[str, float]

    @property
    def cell(self) -> Cell:
        """What was measured."""
        return self.figures.cell


def settings(run: Run) -> dict[Setting, list[Entry]]:
    """Entries of all cells with figures: settings as they first appear, cells by method and budget."""
    groups = groups_by_cell(run)
    found: dict[Setting, list[Entry]] = defaultdict(list)
    for each in sorted(figures(run), key=lambda f: cell_order(f.cell)):
        found[Setting.of(each.cell)].append(Entry(each, _round_seconds(groups[each.cell])))
    return {setting: found[setting] for setting in dict.fromkeys(Setting.of(cell) for cell in groups)}


def cell_order(cell: Cell) -> tuple[int, float]:
    """Sorts by method, then by budget: none, numbers, "auto"."""
    budget = cell.budget if isinstance(cell.budget, int) else float("inf") if cell.budget == "auto" else -1
    return METHODS.index(cell.method), budget


def _round_seconds(groups: Iterable[Group]) -> dict[str, float]:
    seconds, rounds = Counter[str](), 0
    for group in groups:
        seconds.update(group.split_s)
        rounds += sum(group.rounds.values())
    return {part: seconds[part] / rounds for part in PARTS} if rounds and seconds else {}
