#!/usr/bin/env python3
"""The README's pictures: a real draft tree with its accepted path, and the speed of the shipped head.

    jetspec inspect "I have 3 bags of 7 apples. How many apples do I have?" --round 3 --json > docs/images/round.json
    python benchmarks/pictures.py [--round docs/images/round.json] [--output docs/images]

Every picture is written twice, for light and for dark pages. The same input gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Tokens per second of `python3 run.py demo --json` (docs/performance.md).
DEMO = {"plain decoding": 9.3, "JetSpec": 14.8}
#: Acceptance length by rows of a tree, from benchmarks/acceptance.py (the model card of the shipped head).
ACCEPTANCE = {
    "GSM8K": {16: 3.05, 64: 3.63, 256: 4.07},
    "MT-Bench": {16: 1.94, 64: 2.26},
}


@dataclass(frozen=True)
class Theme:
    """Colours of a picture on one kind of page."""

    name: str
    text: str
    muted: str
    box: str
    accent: str
    on_accent: str
    second: str


THEMES = (
    Theme("light", "#1f2328", "#59636e", "#eaeef2", "#1a7f37", "#ffffff", "#0969da"),
    Theme("dark", "#f0f6fc", "#9198a1", "#2a313c", "#2ea043", "#ffffff", "#58a6ff"),
)


def main() -> None:
    """Write every picture in both themes."""
    folder = Path(__file__).resolve().parents[1] / "docs" / "images"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--round", type=Path, default=folder / "round.json", help="output of `jetspec inspect --json`")
    parser.add_argument("--output", type=Path, default=folder)
    parser.add_argument("--format", default="svg", choices=["svg", "png"])
    options = parser.parse_args()
    record = json.loads(options.round.read_text(encoding="utf-8"))
    for theme in THEMES:
        with style(theme):
            for name, figure in (("tree", tree(record, theme)), ("speed", speed(theme))):
                path = options.output / f"{name}-{theme.name}.{options.format}"
                metadata = {"Date": None} if options.format == "svg" else None
                figure.savefig(path, transparent=True, metadata=metadata)
                print(path)


@contextmanager
def style(theme: Theme) -> Iterator[None]:
    """Matplotlib's settings for one theme. Text becomes outlines, so that it looks the same everywhere."""
    settings: Any = {
        "svg.fonttype": "path",
        "svg.hashsalt": "jetspec",
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "text.parse_math": False,
        "axes.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), theme.text),
        "axes.edgecolor": theme.muted,
    }
    with matplotlib.rc_context(settings):
        yield


def tree(record: dict[str, Any], theme: Theme) -> Figure:
    """The draft tree of a round, root on the left, with the accepted path and the bonus token."""
    nodes = record["nodes"]
    places = layout([node["parent"] for node in nodes])
    last = max(node["row"] for node in nodes if node["accepted"])
    bonus = (places[last][0] + 1, places[last][1])
    right = max(x for x, _ in [*places, bonus])
    bottom = max(y for _, y in places)
    figure = Figure(figsize=(9.0, 0.52 * (bottom + 1) + 1.0))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-0.55, right + 0.55), ylim=(bottom + 1.5, -1.1))
    axes.axis("off")
    for node, place in zip(nodes, places, strict=True):
        if node["parent"] >= 0:
            color, zorder = (theme.accent, 1.5) if node["accepted"] else (theme.muted, 1.0)
            edge(axes, places[node["parent"]], place, color, zorder)
    edge(axes, places[last], (bonus[0] - 0.36, bonus[1]), theme.accent, dashed=True)
    for node, place in zip(nodes, places, strict=True):
        note = f"{node['path_probability']:.3f}" if node["parent"] >= 0 else "anchor"
        box(axes, place, node["text"], note, theme, accepted=node["accepted"])
    box(axes, bonus, record["bonus"]["text"], "bonus", theme, is_bonus=True)
    text = record["answer_so_far"].removesuffix(nodes[0]["text"]).strip()
    axes.text(-0.4, -0.8, f"{text} …", color=theme.muted, va="center", style="italic")
    accepted = [node["text"] for node in nodes if node["accepted"]][1:]
    answer = "".join([*accepted, record["bonus"]["text"]]).strip()
    summary = f"{len(nodes)} rows in one forward of the target, {len(accepted) + 1} tokens out: {answer}"
    axes.text(-0.4, bottom + 1.1, summary, color=theme.text, va="center", weight="bold")
    return figure


def layout(parents: list[int]) -> list[tuple[float, float]]:
    """A place (depth, line) for every node: leaves take lines from the top, a parent that of its first child."""
    children: dict[int, list[int]] = {}
    for row, parent in enumerate(parents):
        children.setdefault(parent, []).append(row)
    places: dict[int, tuple[float, float]] = {}
    lines = 0

    def put(row: int, depth: int) -> float:
        nonlocal lines
        below = [put(child, depth + 1) for child in children.get(row, [])]
        if not below:
            lines += 1
        places[row] = (float(depth), below[0] if below else float(lines - 1))
        return places[row][1]

    put(0, 0)
    return [places[row] for row in range(len(parents))]


def edge(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    color: str,
    zorder: float = 1,
    *,
    dashed: bool = False,
) -> None:
    """A connection that leaves its parent to the right and reaches its child from the left."""
    middle = (start[0] + end[0]) / 2
    axes.plot(
        [start[0], middle, middle, end[0]],
        [start[1], start[1], end[1], end[1]],
        color=color,
        linewidth=1.8 if not dashed else 1.5,
        linestyle=(0, (3, 2)) if dashed else "-",
        solid_joinstyle="round",
        zorder=zorder,
    )


def box(
    axes: Axes,
    place: tuple[float, float],
    token: str,
    note: str,
    theme: Theme,
    *,
    accepted: bool = False,
    is_bonus: bool = False,
) -> None:
    """A token with a note below it."""
    x, y = place
    axes.add_patch(
        FancyBboxPatch(
            (x - 0.36, y - 0.36),
            0.72,
            0.72,
            boxstyle="round,pad=0,rounding_size=0.1",
            mutation_aspect=2.0,
            facecolor="none" if is_bonus else theme.accent if accepted else theme.box,
            edgecolor=theme.accent if is_bonus else "none",
            linewidth=1.6,
            zorder=2,
        )
    )
    color = theme.on_accent if accepted else theme.text
    axes.text(x, y - 0.12, token.strip() or "␣", color=color, ha="center", va="center", weight="bold", zorder=3)
    axes.text(x, y + 0.2, note, color=color, ha="center", va="center", fontsize=7.5, zorder=3)


def speed(theme: Theme) -> Figure:
    """Tokens per second of the demo, and acceptance length against the rows of a tree."""
    figure = Figure(figsize=(9.0, 2.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = list(DEMO)
    bars = left.barh(names, list(DEMO.values()), color=[theme.muted, theme.accent], height=0.6)
    left.bar_label(bars, [f"{value:.1f}" for value in DEMO.values()], padding=4)
    left.invert_yaxis()
    left.margins(x=0.15)
    left.spines[["bottom", "left"]].set_visible(False)
    left.tick_params(bottom=False, labelbottom=False, left=False)
    ratio = DEMO["JetSpec"] / DEMO["plain decoding"]
    left.set_title(f"Demo, tokens per second: {ratio:.2f} times as fast", loc="left", fontsize=10)
    for (name, points), color, marker in zip(ACCEPTANCE.items(), (theme.accent, theme.second), "os", strict=True):
        right.plot(list(points), list(points.values()), color=color, marker=marker, linewidth=2)
        for rows, length in points.items():
            right.annotate(f"{length:.2f}", (rows, length), (0, 7), textcoords="offset points", ha="center")
        rows, length = list(points.items())[-1]
        right.annotate(name, (rows, length), (12, 0), textcoords="offset points", va="center", color=color)
    right.set_xscale("log", base=2)
    right.set_xticks([16, 64, 256], ["16", "64", "256"])
    right.set(xlim=(12, 700), ylim=(1, 4.7), xlabel="rows of the draft tree")
    right.set_title("Tokens per forward of the target", loc="left", fontsize=10)
    return figure


if __name__ == "__main__":
    main()
