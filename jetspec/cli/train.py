"""`jetspec train`: a draft head for a target, from a file of prompts. Its options are the fields of `TrainConfig`."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jetspec.cli.common import JsonOption, messages, print_json, quiet_transformers, results
from jetspec.train.config import TrainConfig, read_config_file
from jetspec.train.fields import Kind, Option, flag_of, kinds, option_of

if TYPE_CHECKING:
    from jetspec.train import TrainResult

#: Options of the command that are no fields of the configuration.
RUN_OPTIONS = frozenset({"config", "json"})
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", help="YAML or JSON file of these options, like `epochs: 6`; options given here win."
    ),
]


def train(context: typer.Context, **options: Any) -> None:
    """Train a draft head for a target on a file of prompts.

    The target answers the prompts itself. --target, --prompts and --output are needed, here or in the --config file.
    The same command goes on where it was stopped. torchrun starts it on several GPUs. Progress goes to stderr.
    """
    from jetspec.train.run import train as run

    file = options["config"]
    # Sources are compared by name: some releases of typer bring their own click.
    given = {
        name: value.value if isinstance(value, Enum) else value
        for name, value in options.items()
        if name not in RUN_OPTIONS and getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }
    config = TrainConfig.from_dict({**({} if file is None else read_config_file(file)), **given})
    quiet_transformers()
    result = run(config, console=messages)
    from accelerate import PartialState

    state = PartialState()
    state.destroy_process_group()
    if state.is_main_process:
        show(result, json=options["json"])


def show(result: TrainResult, *, json: bool) -> None:
    """Print how the run ended and what was measured."""
    if json:
        print_json({**asdict(result), "output": str(result.output)})
        return
    state = "finished" if result.finished else "stopped; the same command goes on"
    results.print(f"{result.output}: step {result.steps} of {result.num_steps}, {state}", highlight=False, markup=False)
    for measured in result.measured:
        length, budget = measured.acceptance_length, measured.tree_budget
        results.print(f"acceptance length {length:.2f} on held-out prompts with {budget} rows", highlight=False)


def option_parameters() -> list[inspect.Parameter]:
    """A keyword parameter for each field, as typer reads them."""
    known = kinds(TrainConfig)
    return [_parameter(field, option_of(field), known[field.name]) for field in dataclasses.fields(TrainConfig)]


def _parameter(field: dataclasses.Field[Any], option: Option, kind: Kind) -> inspect.Parameter:
    default: Any = None if field.default is dataclasses.MISSING else field.default
    hint: Any = kind.types[0] if len(kind.types) == 1 else str
    if dict in kind.types:
        hint = str
    if kind.entries is not None:
        hint, default = str, None if default is None else ",".join(map(str, default))
    if kind.choices:
        make: Any = Enum
        hint = make("Choice", dict(zip(kind.choices, kind.choices)), type=str)
    limits: dict[str, Any] = {"min": option.least, "max": option.most} if hint in (int, float) else {}
    # Where a flag is spelt out, typer no longer makes one of the name.
    spelt_out = any(flag.startswith("--") for flag in option.flags)
    flags = option.flags if spelt_out else (*option.flags, flag_of(field.name))
    info = typer.Option(*flags, help=option.help, rich_help_panel=option.group, **limits)
    hint = hint if default is not None else hint | None
    annotation = Annotated[hint, info]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _signature() -> inspect.Signature:
    kind = inspect.Parameter.KEYWORD_ONLY
    [context] = [p for p in inspect.signature(train, eval_str=True).parameters.values() if p.name == "context"]
    own = [
        inspect.Parameter("config", kind, default=None, annotation=ConfigOption),
        inspect.Parameter("json", kind, default=False, annotation=JsonOption),
    ]
    return inspect.Signature([context, *option_parameters(), *own])


train.__signature__ = _signature()  # type: ignore[attr-defined]
