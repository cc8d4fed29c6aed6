"""Plots: well-formed SVG that fits any page, the same in every run, readable without colour."""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable, Mapping
from typing import Any
from xml.etree import ElementTree

import pytest

from jetspec.bench.records import METHODS
from jetspec.bench.report import plots
from jetspec.errors import JetSpecError

SVG = "{http://www.w3.org/2000/svg}"
BUDGETS: dict[str, dict[plots.Budget, plots.Estimate]] = {
    "plain": {None: (1.0, None)},
    "ngram": {"auto": (1.2, (1.1, 1.3))},
    "jetspec": {64: (2.5, (2.2, 2.7)), 16: (2.0, (1.8, 2.3)), "auto": (2.6, (2.4, 2.8))},
}
DRAWN: dict[str, Callable[..., str]] = {
    "speed-up (×)": lambda **k: plots.against_budget(BUDGETS, label="speed-up (×)", **k),
    "depth (drafted tokens)": lambda **k: plots.by_depth({"jetspec 64": [0.9, 0.5], "ngram auto": [0.4]}, **k),
    "mean verify time (ms)": lambda **k: plots.verify_time({"jetspec": [(16, 0.03), (64, 0.05)]}, **k),
    "time of a sequence's round (ms)": lambda **k: plots.round_time(
        {"plain": {"verify": 0.02, "other": 0.001}, "jetspec 64": {"verify": 0.03, "draft": 0.01}}, **k
    ),
}
draws = pytest.mark.parametrize(("label", "draw"), DRAWN.items(), ids=list(DRAWN))


def texts(svg: str) -> list[str]:
    return ["".join(element.itertext()).strip() for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


@draws
def test_svg_fits_any_page(label: str, draw: Callable[..., str]) -> None:
    svg = draw(title="a <plot> & more")
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    assert root.get("aria-label") == "a <plot> & more"
    assert label in texts(svg)
    assert plots.FOREGROUND not in svg
    assert "currentColor" in svg
    assert not list(root.iter(f"{SVG}style")), "it would hold for the whole page"
    # Nothing is painted behind the plot, and nothing from elsewhere is needed.
    assert not re.search(r"fill: *(#ffffff|white)", svg)
    assert set(re.findall(r"https?://[^\"' )<]*", svg)) == {"http://www.w3.org/2000/svg"}
    assert "xlink" not in svg


@draws
def test_same_data_same_bytes(label: str, draw: Callable[..., str]) -> None:
    assert draw(title="a") == draw(title="a")


@draws
def test_ids_of_two_plots_differ_and_all_are_used(label: str, draw: Callable[..., str]) -> None:
    one, two = draw(title="one"), draw(title="two")
    ids = [set(re.findall(r'\bid="([^"]+)"', svg)) for svg in (one, two)]
    assert ids[0]
    assert not ids[0] & ids[1]
    assert set(re.findall(r'(?:url\(#|href="#)([^")]+)', one)) == ids[0]


@draws
def test_a_file_of_its_own_has_colours_for_light_and_dark(label: str, draw: Callable[..., str]) -> None:
    svg = draw(title="a", standalone=True)
    (style,) = ElementTree.fromstring(svg).iter(f"{SVG}style")
    assert re.fullmatch(r"svg\{color:#\w+\}@media \(prefers-color-scheme:dark\)\{svg\{color:#\w+\}\}", style.text or "")


def test_budget_axis_is_logarithmic_with_the_budgets_as_ticks() -> None:
    methods = {"jetspec": {b: (float(b), None) for b in (4, 16, 64)}, "plain": {None: (1.0, None)}}
    svg = plots.against_budget(methods, title="a", label="rows")  # type: ignore[arg-type]
    x = {
        "".join(element.itertext()).strip(): float(element.get("x", "nan"))
        for element in ElementTree.fromstring(svg).iter(f"{SVG}text")
        if element.get("x")
    }
    assert x["16"] - x["4"] == pytest.approx(x["64"] - x["16"], abs=0.01)
    assert x["none"] > x["64"]
    assert any("log" in text for text in texts(svg))
    assert "auto" not in x


def drawn_points(monkeypatch: pytest.MonkeyPatch, values: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What goes to the axes: for each label y values and the lengths of the interval bars."""
    from matplotlib.axes import Axes

    seen: dict[str, tuple[Any, Any]] = {}
    original = Axes.errorbar

    def errorbar(self: Axes, x: Any, y: Any, yerr: Any = None, **options: Any) -> Any:
        seen[f"{options['label']} {len(seen)}"] = (list(y), [list(side) for side in yerr])
        return original(self, x, y, yerr=yerr, **options)

    monkeypatch.setattr(Axes, "errorbar", errorbar)
    plots.against_budget(values, title="a", label="speed-up (×)")
    return seen


def test_values_and_intervals_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = drawn_points(monkeypatch, BUDGETS)
    assert seen["plain 0"] == ([1.0], [[0.0], [0.0]])
    assert seen["jetspec 2"][0] == [2.0, 2.5]  # by budget, not as given
    below, above = seen["jetspec 2"][1]
    assert below == pytest.approx([0.2, 0.3])
    assert above == pytest.approx([0.3, 0.2])
    assert seen["_jetspec 3"][0] == [2.6]  # "auto", not named a second time


def test_an_interval_beside_the_value_does_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drawn_points(monkeypatch, {"jetspec": {8: (2.0, (2.1, 2.2))}})["jetspec 0"][1][0] == [0.0]


def test_legend_names_every_series_once() -> None:
    found = texts(plots.against_budget(BUDGETS, title="a", label="speed-up (×)"))
    assert [found.count(name) for name in BUDGETS] == [1, 1, 1]
    parts = texts(DRAWN["time of a sequence's round (ms)"](title="a"))
    assert [parts.count(part) for part in ("draft", "verify", "other")] == [1, 1, 1]


def test_names_are_no_formulas() -> None:
    assert "$x_1$ & <y>" in texts(plots.by_depth({"$x_1$ & <y>": [0.5]}, title="a"))


def test_every_method_has_a_look_that_differs_without_colour() -> None:
    assert set(plots.STYLES) == set(METHODS)
    assert len({style[0] for style in plots.STYLES.values()}) == len(METHODS)
    assert len({style[1] for style in plots.STYLES.values()}) == len(METHODS)
    assert len({hatch for _, hatch in plots._FILLS}) == len(plots._FILLS)


def test_a_method_keeps_its_look_and_others_take_what_is_left() -> None:
    looks = dict(plots._styles(["other", "jetspec 16", "jetspec 64", "plain"]))
    assert looks["jetspec 16"] == plots.STYLES["jetspec"]
    assert looks["plain"] == plots.STYLES["plain"]
    assert len(set(looks.values())) == 4
    assert len(dict(plots._styles(map(str, range(20))))) == 20


def test_colours_can_be_seen_on_white_and_on_dark() -> None:
    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    colours = {style[2] for style in plots.STYLES.values()} - {plots.FOREGROUND} | {
        colour for colour, _ in plots._FILLS
    }
    for colour in colours:
        light = luminance(colour) + 0.05
        assert (luminance("#ffffff") + 0.05) / light >= 3, colour
        assert light / (luminance("#0d1117") + 0.05) >= 3, colour


def test_missing_matplotlib_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *rest: Any, **options: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(JetSpecError, match=re.escape("pip install 'jetspec[bench]'")):
        plots.by_depth({"jetspec": [0.5]}, title="a")
