"""`jetspec bench`: run methods of decoding side by side on real prompts, and write reports about such runs.

`jetspec bench serve`, which loads a server, is in `bench_serve`. Its runs are reported and compared here, too.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jetspec.bench.config import BenchConfig
from jetspec.cli.bench_serve import finish_load, serve
from jetspec.cli.common import INTERRUPTED, fail, messages, print_json, quiet_transformers, results
from jetspec.cli.config_command import command_for
from jetspec.cli.options import JsonOption
from jetspec.errors import JetSpecError

if TYPE_CHECKING:
    from jetspec.bench.records import Cell, Run

bench = typer.Typer(name="bench")


def measure(config: BenchConfig, *, json: JsonOption = False) -> None:
    """Answer real prompts with several methods of decoding, and compare.

    The methods take turns on the same questions. The same command resumes a run that was stopped. The exit status is 0
    only if everything could be measured.
    """
    from jetspec.bench.report import check_libraries

    check_libraries()
    quiet_transformers()
    try:
        run = run_with_progress(config)
    except KeyboardInterrupt:
        message = f"interrupted; the same command resumes the run in {config.output}"
        messages.print(message, markup=False, highlight=False)
        raise typer.Exit(INTERRUPTED) from None
    finish(run, config.output, json=json)
    if run.failures:
        raise fail(f"{len(run.failures)} of the cells could not be measured; the same command tries them again")


_measure = command_for(BenchConfig, measure, name="bench")


def _measure_or_subcommand(context: typer.Context, **options: Any) -> None:
    if context.invoked_subcommand is None:
        _measure(context=context, **options)


_measure_or_subcommand.__doc__ = measure.__doc__
_measure_or_subcommand.__signature__ = inspect.signature(_measure)  # type: ignore[attr-defined]
bench.callback(invoke_without_command=True)(_measure_or_subcommand)


bench.command()(serve)


@bench.command()
def report(folder: Annotated[Path, typer.Argument(help="Folder of a run.")], json: JsonOption = False) -> None:
    """Write the reports of a run again, and show its tables."""
    if is_load_test(folder):
        from jetspec.bench.serve.records import LEVELS, read_load_test

        finish_load(read_load_test(folder / LEVELS), folder, json=json)
        return
    from jetspec.bench.records import read_run
    from jetspec.bench.results import RESULTS

    finish(read_run(folder / RESULTS), folder, json=json)


@bench.command()
def compare(folders: Annotated[list[Path], typer.Argument(help="Folders of two or more runs.")]) -> None:
    """Print the figures of several runs side by side, as Markdown."""
    if len(folders) < 2:
        raise JetSpecError("compare: give the folders of two or more runs")
    loads = [folder for folder in folders if is_load_test(folder)]
    if loads:
        print(compare_loads(folders, loads))
        return
    from jetspec.bench.records import read_run
    from jetspec.bench.report import compare as compared
    from jetspec.bench.results import RESULTS

    print(compared([(str(folder), read_run(folder / RESULTS)) for folder in folders]))


def is_load_test(folder: Path) -> bool:
    """Whether a folder holds a run of `jetspec bench serve`."""
    from jetspec.bench.serve.records import LEVELS

    return (folder / LEVELS).exists()


def compare_loads(folders: list[Path], loads: list[Path]) -> str:
    """The comparison of load tests. JetSpecError if some of the folders hold something else."""
    from jetspec.bench.serve.records import LEVELS, read_load_test
    from jetspec.bench.serve.report import compare as compared

    others = [str(folder) for folder in folders if folder not in loads]
    if others:
        raise JetSpecError(f"compare: {', '.join(others)}: no load test, as the others are; compare like with like")
    return compared([(str(folder), read_load_test(folder / LEVELS)) for folder in folders])


def run_with_progress(config: BenchConfig) -> Run:
    """Run a benchmark behind a progress bar on stderr."""
    from jetspec.bench.run import run

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=messages, transient=True) as bars:
        task = bars.add_task("loading", total=None)

        def progress(cell: Cell, done: int, total: int) -> None:
            where = f"{cell.dataset}, temperature {cell.temperature:g}, batch {cell.batch_size}: {cell.label}"
            bars.update(task, description=where, completed=done, total=total)

        return run(config, progress=progress)


def finish(run: Run, folder: Path, *, json: bool) -> None:
    """Write the reports and print the figures."""
    from jetspec.bench.metrics import figures
    from jetspec.bench.report import show, write_reports

    paths = [str(path) for path in write_reports(folder)]
    if json:
        print_json(
            {
                "figures": [entry.model_dump() for entry in figures(run)],
                "failures": [entry.model_dump() for entry in run.failures],
                "reports": paths,
            }
        )
        return
    show(run, results)
    messages.print("written: " + ", ".join(paths), markup=False, highlight=False, soft_wrap=True)
