"""The command line: `jetspec demo | generate | train | bench | export | verify | inspect`.

Each command lives in a module of its own and imports torch only when it runs, so that `--help` is quick.
"""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from jetspec import __version__
from jetspec.cli.bench import bench
from jetspec.cli.common import fail
from jetspec.cli.demo import demo
from jetspec.cli.export import export
from jetspec.cli.generate import generate
from jetspec.cli.inspect import inspect
from jetspec.cli.train import train
from jetspec.cli.verify import verify
from jetspec.errors import JetSpecError


class Commands(TyperGroup):
    """Turns an error that is the user's to fix into one line on stderr and exit status 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except JetSpecError as error:
            raise fail(str(error)) from error


app = typer.Typer(
    name="jetspec",
    cls=Commands,
    help="Lossless speculative decoding with causal parallel draft trees.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"jetspec {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


for command in (demo, generate, train, export, verify, inspect):
    app.command()(command)
app.add_typer(bench)


def main() -> None:
    """Entry point of the `jetspec` program."""
    app()
