"""The command line: `jetspec demo | chat | generate | train | bench | export | verify | inspect`.

Each command lives in a module of its own and imports torch only when it runs, so that `--help` is quick.
"""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from jetspec import __version__
from jetspec.cli.bench import bench
from jetspec.cli.chat import chat
from jetspec.cli.common import check_utf_8, fail, show_log
from jetspec.cli.demo import demo
from jetspec.cli.export import export
from jetspec.cli.generate import generate
from jetspec.cli.inspect import inspect
from jetspec.cli.train import train
from jetspec.cli.verify import verify
from jetspec.errors import JetSpecError


class Commands(TyperGroup):
    """Checks what all commands are given, and prints their errors.

    An error that the user can fix is one line on stderr, with exit status 1. An argument that is not valid UTF-8 is a
    usage error, with exit status 2.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Check the arguments of the program, those of its commands included."""
        check_utf_8(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        show_log()
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
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


for command in (demo, chat, generate, train, export, verify, inspect):
    app.command()(command)
app.add_typer(bench)


def main() -> None:
    """Entry point of the `jetspec` program."""
    app()
