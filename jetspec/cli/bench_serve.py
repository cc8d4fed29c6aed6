"""`jetspec bench serve`: send requests to a server at given rates, and write reports about what they waited for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jetspec.bench.serve.config import ServeConfig
from jetspec.cli.common import INTERRUPTED, fail, messages, print_json, results
from jetspec.cli.config_command import command_for
from jetspec.cli.options import JsonOption

if TYPE_CHECKING:
    from jetspec.bench.serve.records import LoadTest


def load(config: ServeConfig, *, json: JsonOption = False) -> None:
    """Send requests to an OpenAI-compatible server at given rates, and measure what they wait for.

    Requests are sent at random times whether or not those before them have been answered. No more are sent than
    --num-requests at each rate, one rate after the other. The same command resumes a run that was stopped. The exit
    status is 0 only if every request was answered.
    """
    from jetspec.bench.report import check_libraries

    check_libraries()
    try:
        test = load_with_progress(config)
    except KeyboardInterrupt:
        message = f"interrupted; the same command resumes the run in {config.output}"
        messages.print(message, markup=False, highlight=False)
        raise typer.Exit(INTERRUPTED) from None
    finish_load(test, config.output, json=json)
    requests = [request for level in test.levels for request in level.requests]
    failed = sum(request.error is not None for request in requests)
    if failed:
        raise fail(f"{failed} of {len(requests)} requests failed; the report counts their causes")


serve = command_for(ServeConfig, load, name="serve")


def load_with_progress(config: ServeConfig) -> LoadTest:
    """Run a load test behind a progress bar on stderr."""
    from jetspec.bench.serve.run import run

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=messages, transient=True) as bars:
        task = bars.add_task("warm-up", total=None)

        def progress(rate: float, ended: int, total: int) -> None:
            bars.update(task, description=f"{rate:g} requests/s", completed=ended, total=total)

        return run(config, progress=progress)


def finish_load(test: LoadTest, folder: Path, *, json: bool) -> None:
    """Write the reports and print the figures."""
    from jetspec.bench.serve.figures import figures
    from jetspec.bench.serve.report import show, write_reports

    paths = [str(path) for path in write_reports(folder)]
    if json:
        print_json({"figures": [level.model_dump() for level in figures(test)], "reports": paths})
        return
    show(test, results)
    messages.print("written: " + ", ".join(paths), markup=False, highlight=False, soft_wrap=True)
