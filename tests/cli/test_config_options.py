"""A command made of a configuration class: every type of field, its names, its file, and what `run` adds."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from pydantic import Field
from typer.testing import CliRunner, Result

from jetspec.cli.config_command import command_for, option_parameters
from jetspec.cli.options import JsonOption
from jetspec.config import Config, option


class Settings(Config):
    """One field of each type that options can be made of."""

    output: Path = option(help="Where it goes.", flags=("--output", "-o"))
    name: str | Path | None = option(None, help="A name.")
    count: int = option(3, help="A count.", group="Sizes", ge=2)
    limit: int | None = option(None, help="A limit.", ge=1)
    rate: float = option(0.5, help="A rate.", group="Sizes", ge=0, le=1)
    kind: Literal["tree", "chain"] = option("tree", help="A kind.")
    other: Literal["a", "b"] | None = option(None, help="Another kind.")
    fast: bool = option(False, help="A switch.", flags=("--fast",))
    chat: bool | None = option(None, help="A choice.", flags=("--chat/--raw",))
    ids: tuple[Annotated[int, Field(ge=0)], ...] | None = option(None, help="Ids.", min_length=1)
    budgets: tuple[int | Literal["auto"], ...] = option(("auto",), help="Budgets.", flags=("--budget", "-b"))
    texts: tuple[str, ...] = option(("x",), help="Texts.")
    mapping: dict[str, Any] | None = option(None, help="A mapping.")
    token: int | str | None = option(None, help="A token.")


@pytest.fixture
def built() -> list[Any]:
    return []


@pytest.fixture
def app(built: list[Any]) -> typer.Typer:
    def run(config: Settings, *, json: JsonOption = False) -> None:
        """Say what it does."""
        built.append((config, json))

    app = typer.Typer()
    app.command()(command_for(Settings, run, name="measure"))
    return app


def call(app: typer.Typer, *arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ((), {}),
        (("--name", "7"), {"name": "7"}),
        (("--count", 5, "--limit", 2, "--rate", 1), {"count": 5, "limit": 2, "rate": 1.0}),
        (("--kind", "chain", "--other", "b"), {"kind": "chain", "other": "b"}),
        (("--fast", "--raw"), {"fast": True, "chat": False}),
        (("--chat",), {"chat": True}),
        (("--ids", "1,3", "--ids", 5), {"ids": (1, 3, 5)}),
        (("-b", 4, "--budget", "auto,16"), {"budgets": (4, "auto", 16)}),
        (("--texts", "1,b", "--texts", "c"), {"texts": ("1,b", "c")}),
        (("--mapping", '{"a": 1}'), {"mapping": {"a": 1}}),
        (("--token", "<mask>"), {"token": "<mask>"}),
        (("--count", 3), {"count": 3}),  # the default, given
    ],
)
def test_options_set_their_fields(
    app: typer.Typer, built: list[Any], arguments: tuple[object, ...], values: dict[str, Any]
) -> None:
    result = call(app, "-o", "out", *arguments)
    assert result.exit_code == 0, result.output
    assert built == [(Settings(output=Path("out"), **values), False)]


def test_the_command_line_wins_over_the_file_also_with_a_default(
    app: typer.Typer, built: list[Any], tmp_path: Path
) -> None:
    values = {"output": "there", "count": 9, "rate": 0.25, "ids": [4], "budgets": ["auto", 2], "chat": None}
    for file, text in (
        ("a.json", json.dumps(values)),
        ("a.yaml", "\n".join(f"{k}: {json.dumps(v)}" for k, v in values.items())),
    ):
        (tmp_path / file).write_text(text)
        assert call(app, "--config", tmp_path / file, "--count", 3, "--json").exit_code == 0
        expected = Settings(output=Path("there"), count=3, rate=0.25, ids=(4,), budgets=("auto", 2))
        assert built.pop() == (expected, True)


def test_help_and_limits(app: typer.Typer, built: list[Any]) -> None:
    shown = " ".join(call(app, "--help").output.split())
    for text in ("Say what it does.", "Sizes", "x>=2", "--chat", "--raw", "Where it goes.", "auto"):
        assert text in shown
    assert "--no-fast" not in shown
    for bad in (("--count", 1), ("--rate", 2), ("--kind", "bush"), ("--count", "x")):
        assert call(app, "-o", "out", *bad).exit_code == 2
    for bad, message in {
        ("--ids", "x"): "ids.0='x': must be an integer",
        ("--limit", 1): "output: is required",
    }.items():
        result = call(app, *bad, *(() if "output" in message else ("-o", "out")))
        assert message in str(result.exception)
    assert not built


def test_every_field_is_an_option_with_its_default() -> None:
    parameters = {p.name: p for p in option_parameters(Settings)}
    assert list(parameters) == list(Settings.model_fields)
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters.values())
    assert (parameters["count"].default, parameters["budgets"].default, parameters["output"].default) == (
        3,
        ["auto"],
        None,
    )
