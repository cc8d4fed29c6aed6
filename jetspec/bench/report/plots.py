"""Plots as SVG text, from plain data.

Text and axes take the colour of the text around the plot, so one file fits light and dark pages; text stays text.
Series differ in marker and line or hatch, not by colour alone. The same data give the same bytes.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal
from xml.etree import ElementTree

from jetspec.errors import JetSpecError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Budget = int | Literal["auto"] | None
#: A value and its interval, where there is one.
Estimate = tuple[float, tuple[float, float] | None]
#: Line, marker and their colour.
Style = tuple[str | tuple[int, tuple[float, ...]], str, str]

#: Stands for the colour of the text around, which matplotlib has no name for.
FOREGROUND = "#010203"
#: Looks of the methods; other names take those that are left. Each colour has a contrast of at least 3 to a white and
#: to a dark page, and hues are told apart with the common kinds of colour blindness (after Okabe and Ito, 2008).
STYLES: dict[str, Style] = {
    "jetspec": ("-", "o", "#d55e00"),
    "dflash-tree": ("--", "s", "#0077bb"),
    "dflash-chain": (":", "D", "#2f8fc0"),
    "eagle": ("-.", "^", "#00906a"),
    "draft-model": ((0, (5, 1)), "v", "#bb6698"),
    "ngram": ((0, (1, 1)), "P", "#b07d10"),
    "hf": ((0, (3, 1, 1, 1, 1, 1)), "X", "#828282"),
    "plain": ((0, (8, 3)), "d", FOREGROUND),
}
#: Colours and hatches of stacked parts, in order.
_FILLS = [
    ("#d55e00", "//"),
    ("#b07d10", ".."),
    ("#0077bb", ""),
    ("#00906a", "xx"),
    ("#bb6698", "\\\\"),
    ("#828282", "++"),
]
_SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "text.parse_math": False,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.alpha": 0.2,
    "hatch.linewidth": 0.8,
    "legend.frameon": False,
    "lines.markersize": 6,
    "text.color": FOREGROUND,
    "axes.edgecolor": FOREGROUND,
    "axes.labelcolor": FOREGROUND,
    "xtick.color": FOREGROUND,
    "ytick.color": FOREGROUND,
    "grid.color": FOREGROUND,
}
_SVG = "http://www.w3.org/2000/svg"
_STANDALONE = "svg{color:#1f2328}@media (prefers-color-scheme:dark){svg{color:#e6edf3}}"


def against_budget(
    methods: Mapping[str, Mapping[Budget, Estimate]], *, title: str, label: str, standalone: bool = False
) -> str:
    """A value against the tree budget, with one line for each method.

    Cells with the budget "auto" or none stand at the side, with a thin line for comparison.

    Args:
        methods: for each method its values by budget.
        title: what screen readers say; must differ between the plots of a page.
        label: the value and its unit.
        standalone: give the file colours of its own for light and dark pages, as an <img> needs them.
    """
    places = _places({budget for values in methods.values() for budget in values})
    with _plot(title, standalone) as plot:
        for number, (name, style) in enumerate(_styles(methods)):
            shift = 0.06 * places.step * (number - (len(methods) - 1) / 2)
            _draw_method(plot.axes, name, style, methods[name], places, shift)
        ticks = list(places.of.values())
        plot.axes.set_xticks(ticks, ["none" if budget is None else str(budget) for budget in places.of])
        plot.axes.set_xlim(min(ticks) - places.step / 2, max(ticks) + places.step / 2)
        if places.side is not None:
            plot.axes.axvline(places.side, color=FOREGROUND, linewidth=0.8, alpha=0.4)
        plot.axes.set_xlabel("tree budget (rows of a verify forward, log scale)")
        plot.axes.set_ylabel(label)
        plot.legend()
    return plot.svg


def by_depth(methods: Mapping[str, Sequence[float]], *, title: str, standalone: bool = False) -> str:
    """Share of the verify forwards that accepted at least d drafted tokens, d = 1, 2, ..., a line a method."""
    with _plot(title, standalone) as plot:
        for name, (line, marker, colour) in _styles(methods):
            shares = [100 * share for share in methods[name]]
            depths = range(1, len(shares) + 1)
            plot.axes.plot(depths, shares, linestyle=line, marker=marker, color=colour, label=name)
        deepest = max((len(shares) for shares in methods.values()), default=1)
        plot.axes.set_xticks(range(1, deepest + 1, 1 + deepest // 16))
        plot.axes.set_ylim(0, 104)
        plot.axes.set_xlabel("depth (drafted tokens)")
        plot.axes.set_ylabel("verify forwards that\naccepted so many or more (%)")
        plot.legend()
    return plot.svg


def verify_time(methods: Mapping[str, Sequence[tuple[float, float]]], *, title: str, standalone: bool = False) -> str:
    """Time of a verify forward against its rows: for each method points (rows, seconds)."""
    with _plot(title, standalone) as plot:
        for name, (_, marker, colour) in _styles(methods):
            rows, seconds = zip(*methods[name])
            milliseconds = [1e3 * s for s in seconds]
            look: dict[str, Any] = {"marker": marker, "color": colour, "fillstyle": "none", "markeredgewidth": 1.5}
            plot.axes.plot(rows, milliseconds, linestyle="", label=name, **look)
        plot.axes.set_xscale("log", base=2)
        most = max(row for points in methods.values() for row, _ in points)
        powers = [2**n for n in range(math.ceil(math.log2(max(most, 2))) + 1)]
        plot.axes.set_xticks(powers, map(str, powers))
        plot.axes.minorticks_off()
        plot.axes.set_ylim(0, 1.1e3 * max(seconds for points in methods.values() for _, seconds in points))
        plot.axes.set_xlabel("mean rows of a sequence's verify forward (log scale)")
        plot.axes.set_ylabel("mean verify time (ms)")
        plot.legend()
    return plot.svg


def against_rate(
    lines: Mapping[str, Sequence[tuple[float, float]]], *, title: str, label: str, standalone: bool = False
) -> str:
    """Values against the rate of requests: for each line points (requests a second, value)."""
    with _plot(title, standalone) as plot:
        for name, (line, marker, colour) in _styles(lines):
            rates, values = zip(*lines[name])
            plot.axes.plot(rates, values, linestyle=line, marker=marker, color=colour, label=name)
        plot.axes.set_xlim(left=0)
        plot.axes.set_ylim(bottom=0)
        plot.axes.set_xlabel("requests sent a second")
        plot.axes.set_ylabel(label)
        plot.legend()
    return plot.svg


def round_time(methods: Mapping[str, Mapping[str, float]], *, title: str, standalone: bool = False) -> str:
    """Where a round's time goes: for each method the seconds of its parts, stacked in the order of the first."""
    names = list(methods)
    parts = list(dict.fromkeys(part for seconds in methods.values() for part in seconds))
    with _plot(title, standalone, height=1.3 + 0.3 * len(names)) as plot:
        left = [0.0] * len(names)
        for number, part in enumerate(parts):
            colour, hatch = _FILLS[number % len(_FILLS)]
            widths = [1e3 * methods[name].get(part, 0.0) for name in names]
            look: dict[str, Any] = {"color": colour, "hatch": hatch, "edgecolor": FOREGROUND, "linewidth": 0.6}
            plot.axes.barh(names, widths, left=left, height=0.7, label=part, **look)
            left = [a + b for a, b in zip(left, widths)]
        plot.axes.invert_yaxis()
        plot.axes.grid(visible=False, axis="y")
        plot.axes.grid(visible=True, axis="x")
        plot.axes.set_xlabel("time of a sequence's round (ms)")
        plot.legend()
    return plot.svg


@dataclass(frozen=True)
class _Places:
    """Where budgets lie on the axis, in log2: numbers, then "auto" and none at the side."""

    of: dict[Budget, float]
    step: float
    #: Between the numbers and the side, where there are both.
    side: float | None


def _places(budgets: Iterable[Budget]) -> _Places:
    given = set(budgets)
    numbers = sorted(budget for budget in given if isinstance(budget, int))
    of: dict[Budget, float] = {budget: math.log2(budget) for budget in numbers}
    first, last = (of[numbers[0]], of[numbers[-1]]) if numbers else (0.0, 0.0)
    step = max(last - first, 1.0) / max(len(numbers), 2)
    for budget in ("auto", None):
        if budget in given:
            last += step
            of[budget] = last
    side = of[numbers[-1]] + step / 2 if numbers and len(of) > len(numbers) else None
    return _Places(of, step, side)


def _draw_method(
    axes: Axes, name: str, style: Style, values: Mapping[Budget, Estimate], places: _Places, shift: float
) -> None:
    dashes, marker, colour = style
    lines: list[list[Budget]] = [[budget for budget in places.of if isinstance(budget, int)], ["auto"], [None]]
    drawn = [here for line in lines if (here := [budget for budget in line if budget in values])]
    left = min(places.of.values()) - places.step / 2
    for number, budgets in enumerate(drawn):
        middle = [values[budget][0] for budget in budgets]
        bounds = [values[budget][1] or (value, value) for budget, value in zip(budgets, middle)]
        # An interval need not hold the value itself, and matplotlib takes no negative lengths.
        below = [max(value - low, 0.0) for value, (low, _) in zip(middle, bounds)]
        above = [max(high - value, 0.0) for value, (_, high) in zip(middle, bounds)]
        x = [places.of[budget] + shift for budget in budgets]
        look: dict[str, Any] = {"color": colour, "linestyle": dashes, "marker": marker}
        label = name if number == 0 else f"_{name}"
        axes.errorbar(x, middle, yerr=[below, above], capsize=3, elinewidth=1.2, label=label, **look)
        if budgets[0] in ("auto", None):
            axes.plot([left, x[0]], middle * 2, linestyle=dashes, color=colour, linewidth=0.8, alpha=0.6)


def _styles(names: Iterable[str]) -> Iterator[tuple[str, Style]]:
    """A style for each name; a method, with or without its budget, has its own unless it is taken."""
    names = list(names)
    taken: dict[str, str] = {}
    for name in names:
        method = name.split(" ")[0]
        if method in STYLES and method not in taken.values():
            taken[name] = method
    free = [method for method in STYLES if method not in taken.values()] or list(STYLES)
    others = [name for name in names if name not in taken]
    taken.update((name, free[number % len(free)]) for number, name in enumerate(others))
    return ((name, STYLES[taken[name]]) for name in names)


@dataclass
class _Plot:
    """A plot while it is drawn; `svg` is there afterwards."""

    figure: Figure
    axes: Axes = field(init=False)
    svg: str = ""

    def __post_init__(self) -> None:
        self.axes = self.figure.add_subplot()

    def legend(self) -> None:
        """Name the series above the axes, where they hide nothing."""
        _, labels = self.axes.get_legend_handles_labels()
        columns = 4 if max(map(len, labels), default=0) <= len("dflash-chain") else 3
        self.figure.legend(loc="outside upper center", ncols=columns, handlelength=3.5)


@contextmanager
def _plot(title: str, standalone: bool, height: float = 4.0) -> Iterator[_Plot]:
    try:
        import matplotlib.style
        from matplotlib.figure import Figure
    except ImportError as error:
        raise JetSpecError("plots need matplotlib: pip install 'jetspec[bench]'") from error
    # The salt makes ids unique to the plot, and the same in every run.
    with matplotlib.style.context(["default", {**_SETTINGS, "svg.hashsalt": title}]):
        plot = _Plot(Figure(figsize=(7.2, height), layout="constrained"))
        yield plot
        plot.svg = _svg(plot.figure, title, standalone)


def _svg(figure: Figure, title: str, standalone: bool) -> str:
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    root = ElementTree.fromstring(buffer.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            # matplotlib's style sheet would hold for the whole page that the plot is part of.
            if child.tag in (f"{{{_SVG}}}style", f"{{{_SVG}}}metadata"):
                parent.remove(child)
    root.set("style", "stroke-linejoin:round;stroke-linecap:butt")
    root.set("role", "img")
    root.set("aria-label", title)
    if standalone:
        style = ElementTree.Element(f"{{{_SVG}}}style")
        style.text = _STANDALONE
        root.insert(0, style)
    _tidy(root)
    ElementTree.register_namespace("", _SVG)
    return ElementTree.tostring(root, encoding="unicode")


def _tidy(root: ElementTree.Element) -> None:
    """Put the surrounding colour in, and leave out ids that nothing refers to: they are the same in every plot."""
    text = ElementTree.tostring(root, encoding="unicode")
    for element in root.iter():
        for name, value in list(element.items()):
            del element.attrib[name]
            if name != "id" or f"#{value}" in text:
                element.set(
                    name.removeprefix("{http://www.w3.org/1999/xlink}"), value.replace(FOREGROUND, "currentColor")
                )
