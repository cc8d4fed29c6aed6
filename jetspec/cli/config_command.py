"""A command whose options are the fields of a configuration class."""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from jetspec.config import Config, flag_of, option_extra
from jetspec.errors import JetSpecError

C = TypeVar("C", bound=Config)
#: The name under which a command takes its configuration file.
FILE = "config"
FileOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        help="YAML or JSON file of these options by their names, like `epochs: 6`. Options on the command line win.",
    ),
]


def command_for(config: type[C], run: Callable[[C], None], *, name: str | None = None) -> Callable[..., None]:
    """A typer command that builds a ``config`` from its options and calls ``run`` with it.

    Each field is one option: its description is the help, its group the panel, ``option_extra(field, "flags")`` its
    names. A field with the fact ``argument`` is an argument instead. A field of several values takes them in several
    options; numbers and choices also in one, separated by commas. ``--config FILE`` reads fields from a YAML or JSON
    file. Keyword-only parameters of ``run`` become options as well and are passed on.

    Args:
        config: the configuration class.
        run: called with the configuration; its docstring is the help of the command.
        name: the name of the command; by default that of ``run``.
    """
    own = [p for p in inspect.signature(run, eval_str=True).parameters.values() if p.kind is p.KEYWORD_ONLY]

    def command(context: typer.Context, **options: Any) -> None:
        own_values = {parameter.name: options.pop(parameter.name) for parameter in own}
        file = options.pop(FILE)
        values = {} if file is None else read_values(file)
        for field, value in options.items():
            # Sources are compared by name, because some releases of typer bring their own click.
            if getattr(context.get_parameter_source(field), "name", "") == "COMMANDLINE":
                values[field] = value.value if isinstance(value, Enum) else value
        run(config(**parse_values(config, values)), **own_values)

    command.__name__ = command.__qualname__ = name or run.__name__
    command.__doc__ = run.__doc__
    keyword = inspect.Parameter.KEYWORD_ONLY
    context = inspect.Parameter("context", keyword, annotation=typer.Context)
    file = inspect.Parameter(FILE, keyword, default=None, annotation=FileOption)
    signature = inspect.Signature([context, *option_parameters(config), file, *own])
    command.__signature__ = signature  # type: ignore[attr-defined]
    return command


def option_parameters(config: type[Config]) -> list[inspect.Parameter]:
    """A keyword parameter for each field of ``config``, as typer reads them. None of them is required."""
    return [_parameter(name, field) for name, field in config.model_fields.items()]


def read_values(path: str | Path) -> dict[str, Any]:
    """The fields that a YAML or JSON file sets.

    Raises:
        JetSpecError: the file cannot be read, or does not hold fields and values.
    """
    import yaml

    parse = json.loads if Path(path).suffix == ".json" else yaml.safe_load
    try:
        values = parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise JetSpecError(f"config: cannot read {path}: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise JetSpecError(f"config: {path} must hold fields and values, like `epochs: 6`")
    return {str(name): value for name, value in values.items()}


def parse_values(config: type[Config], values: Mapping[str, Any]) -> dict[str, Any]:
    """Values with text turned into what the fields hold: numbers, lists, mappings and paths.

    Text that cannot be read is left as it is, so that the configuration names it. YAML gives text, too: for ``1e-4``.
    """
    fields = config.model_fields
    return {name: _parsed(fields[name], value) if name in fields else value for name, value in values.items()}


def _parsed(field: FieldInfo, value: Any) -> Any:
    kinds = _kinds(field)
    if tuple in kinds and isinstance(value, str | list):
        texts = [value] if isinstance(value, str) else value
        if str in kinds[tuple]:  # which may hold commas
            return tuple(texts)
        parts = [part for text in texts for part in (text.split(",") if isinstance(text, str) else [text])]
        return tuple(map(_from_json, parts))
    if not isinstance(value, str) or str in kinds or Literal in kinds:
        return value
    return Path(value) if Path in kinds else _from_json(value)


def _from_json(text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return text


def _kinds(field: FieldInfo) -> dict[Any, tuple[Any, ...]]:
    """The plain types that a field may hold, None left out, with their own arguments."""
    hint = field.annotation
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return {get_origin(part) or part: _plain(get_args(part)) for part in parts if part is not type(None)}


def _plain(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Type arguments without their annotations and alternatives."""
    bare = [get_args(a)[0] if get_origin(a) is Annotated else a for a in arguments]
    return tuple(inner for a in bare for inner in (get_args(a) if isinstance(a, types.UnionType) else (a,)))


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    kinds = _kinds(field)
    default: Any = None if field.is_required() else field.default
    hint: Any = next(iter(kinds)) if len(kinds) == 1 else str
    if hint is dict:
        hint = str
    elif tuple in kinds:
        hint = list[str]
        default = None if default is None else [str(entry) for entry in default]
    elif hint is Literal:
        make: Any = Enum
        hint = make("Choice", {choice: choice for choice in kinds[Literal]}, type=str)
    flags = option_extra(field, "flags") or (flag_of(name, field),)
    limits = _limits(field) if hint in (int, float) else {}
    info: Any
    if option_extra(field, "argument"):
        info = typer.Argument(help=field.description, show_default=False)
    else:
        info = typer.Option(*flags, help=field.description, rich_help_panel=option_extra(field, "group"), **limits)
    annotation: Any = Annotated[hint if default is not None else hint | None, info]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _limits(field: FieldInfo) -> dict[str, Any]:
    """The inclusive limits of a number, as typer shows and checks them; the configuration checks the others."""
    names = {"ge": "min", "le": "max"}
    return {names[key]: getattr(m, key) for m in field.metadata for key in names if hasattr(m, key)}
