"""`jetspec bench`: methods of decoding side by side on real prompts, and reports about such runs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jetspec.bench.config import BenchConfig
from jetspec.cli.common import (
    DEFAULT_TARGET,
    ChatTemplateKwargsOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    TargetOption,
    fail,
    messages,
    parse_budget,
    print_json,
    quiet_transformers,
    results,
)
from jetspec.errors import JetSpecError

if TYPE_CHECKING:
    from jetspec.bench.records import Cell, Run

#: Exit status of a program that Ctrl-C ended.
INTERRUPTED = 130

bench = typer.Typer(name="bench")


@bench.callback(invoke_without_command=True)
def measure(
    context: typer.Context,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the run; the same command goes on in it.")
    ] = None,
    target: TargetOption = DEFAULT_TARGET,
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft",
            "-d",
            help="Draft head: alias, hub id or directory. Without it the head that ships for the target.",
            show_default=False,
        ),
    ] = None,
    eagle: Annotated[str | None, typer.Option("--eagle", help="Autoregressive head, for eagle.")] = None,
    dflash: Annotated[
        str | None, typer.Option("--dflash", help="Bidirectional head, for dflash-chain and dflash-tree.")
    ] = None,
    draft_model: Annotated[str | None, typer.Option("--draft-model", help="Small model, for draft-model.")] = None,
    datasets: Annotated[
        list[str],
        typer.Option("--dataset", help="gsm8k, math500, humaneval, mt_bench, or a prompt source; may be repeated."),
    ] = ["gsm8k"],  # noqa: B006
    data: Annotated[Path | None, typer.Option("--data", help="Folder with local copies of the data sets.")] = None,
    num_prompts: Annotated[
        int, typer.Option("--num-prompts", min=0, help="Of each data set, spread evenly; 0: all.")
    ] = 20,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Longest answer of a turn.")] = 256,
    methods: Annotated[
        list[str],
        typer.Option(
            "--method",
            "-m",
            help="hf, plain, ngram, draft-model, eagle, dflash-chain, dflash-tree, jetspec; may be repeated. "
            "plain is always measured.",
        ),
    ] = ["plain", "ngram", "jetspec"],  # noqa: B006
    budgets: Annotated[
        list[Any],
        typer.Option(
            "--budget",
            "-b",
            metavar="auto|ROWS",
            parser=parse_budget,
            help="Rows of a verify forward at most, for every method that drafts (auto); may be repeated.",
        ),
    ] = ["auto"],  # noqa: B006
    temperatures: Annotated[
        list[float], typer.Option("--temperature", min=0.0, help="0 is greedy; may be repeated.")
    ] = [0.0],  # noqa: B006
    batch_sizes: Annotated[
        list[int], typer.Option("--batch-size", min=1, help="Questions answered together; may be repeated.")
    ] = [1],  # noqa: B006
    chat_template_kwargs: ChatTemplateKwargsOption = None,
    run_code: Annotated[
        bool, typer.Option("--run-code", help="Execute the code that answers to humaneval hold, to score them.")
    ] = False,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    json: JsonOption = False,
) -> None:
    """Answer real prompts with several methods of decoding, and compare.

    Methods take turns on the same questions. The same command goes on where it was stopped. The exit status is 0 only
    if everything could be measured.
    """
    if context.invoked_subcommand is not None:
        return
    if output is None:
        raise JetSpecError("--output: none given; name a folder for the results")
    config = BenchConfig(
        output=output,
        target=target,
        draft=draft,
        eagle=eagle,
        dflash=dflash,
        draft_model=draft_model,
        datasets=tuple(datasets),
        data=data,
        num_prompts=num_prompts or None,
        max_tokens=max_tokens,
        methods=tuple(methods),  # type: ignore[arg-type]
        budgets=tuple(budgets),
        temperatures=tuple(temperatures),
        batch_sizes=tuple(batch_sizes),
        device=device,
        dtype=dtype,
        chat_template_kwargs=chat_template_kwargs,
        run_code=run_code,
    )
    from jetspec.bench.report import check_libraries

    check_libraries()
    quiet_transformers()
    try:
        run = run_with_progress(config)
    except KeyboardInterrupt:
        messages.print(f"interrupted; the same command goes on in {output}", markup=False, highlight=False)
        raise typer.Exit(INTERRUPTED) from None
    finish(run, output, json=json)
    if run.failures:
        raise fail(f"{len(run.failures)} of the cells could not be measured; the same command tries them again")


@bench.command()
def report(folder: Annotated[Path, typer.Argument(help="Folder of a run.")], json: JsonOption = False) -> None:
    """Write the reports of a run anew, and show its tables."""
    from jetspec.bench.records import read_run
    from jetspec.bench.results import RESULTS

    finish(read_run(folder / RESULTS), folder, json=json)


@bench.command()
def compare(folders: Annotated[list[Path], typer.Argument(help="Folders of two or more runs.")]) -> None:
    """Put the figures of several runs side by side, as Markdown."""
    if len(folders) < 2:
        raise JetSpecError("compare: give the folders of two or more runs")
    from jetspec.bench.records import read_run
    from jetspec.bench.report import compare as compared
    from jetspec.bench.results import RESULTS

    print(compared([(str(folder), read_run(folder / RESULTS)) for folder in folders]))


def run_with_progress(config: BenchConfig) -> Run:
    from jetspec.bench.run import run

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=messages, transient=True) as bars:
        task = bars.add_task("loading", total=None)

        def progress(cell: Cell, done: int, total: int) -> None:
            where = f"{cell.dataset}, temperature {cell.temperature:g}, batch {cell.batch_size}: {cell.label}"
            bars.update(task, description=where, completed=done, total=total)

        return run(config, progress=progress)


def finish(run: Run, folder: Path, *, json: bool) -> None:
    """Write the reports and print what was measured."""
    from jetspec.bench.metrics import figures
    from jetspec.bench.report import show, write_reports

    paths = write_reports(folder)
    if json:
        print_json(
            {
                "figures": [asdict(entry) for entry in figures(run)],
                "failures": [asdict(entry) for entry in run.failures],
                "reports": [str(path) for path in paths],
            }
        )
        return
    show(run, results)
    messages.print("written: " + ", ".join(map(str, paths)), markup=False, highlight=False, soft_wrap=True)
