"""Reports about a run: in the terminal, as Markdown, as one HTML page; and several runs side by side."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from jetspec.bench.records import read_run
from jetspec.bench.report.compare import compare
from jetspec.bench.report.terminal import show
from jetspec.bench.results import RESULTS
from jetspec.errors import JetSpecError

__all__ = ["check_libraries", "compare", "show", "write_reports"]


def check_libraries() -> None:
    """Raise JetSpecError where what pages and plots are made with is missing; better before a run than after it."""
    missing = [name for name in ("jinja2", "matplotlib") if find_spec(name) is None]
    if missing:
        raise JetSpecError(f"reports need {' and '.join(missing)}: pip install 'jetspec[bench]'")


def write_reports(folder: Path) -> list[Path]:
    """Write `report.md` and `report.html` into a run's folder, from the records there. Returns their paths.

    Raises:
        JetSpecError: the records cannot be read, or a library is missing that plots or pages need. The Markdown report
            needs none and is there by then.
    """
    from jetspec.bench.report.html import html_report
    from jetspec.bench.report.markdown import markdown_report

    run = read_run(folder / RESULTS)
    paths = []
    for name, render in (("report.md", markdown_report), ("report.html", html_report)):
        paths.append(folder / name)
        paths[-1].write_text(render(run), encoding="utf-8")
    return paths
