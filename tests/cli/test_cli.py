"""What all commands share: help, errors, exit status."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from jetspec import __version__
from jetspec.cli import app
from tests.helpers.cli import COMMANDS, call


def test_version() -> None:
    result = call("--version")
    assert (result.exit_code, result.stdout.strip()) == (0, f"jetspec {__version__}")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_80_columns(command: str) -> None:
    result = call(command, "--help")
    assert result.exit_code == 0
    assert max(len(line) for line in result.stdout.splitlines()) <= 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("verify", "--target", "{target}", "--draft", "none"), "--draft none: verify needs a draft"),
        (("inspect", "x", "--target", "{target}", "--draft", "none"), "--draft none: inspect needs a draft"),
        (("demo", "--target", "{target}", "--draft", "none"), "--draft none: demo needs a draft"),
        (("generate", "x", "--target", "{target}", "--draft-method", "model"), "draft_method='model' needs"),
        (("generate", "x", "--target", "{target}", "--draft", "{head}", "--draft-method", "ngram"), "takes no model"),
        (("generate", "x", "--target", "{target}", "--draft", "{head}", "--bidirectional"), "the head's config says"),
        (("generate", "x", "--target", "{target}", "--draft", "/nowhere/at/all"), "no draft head"),
        (("generate", "x", "--target", "/nowhere/at/all", "--draft", "none"), "/nowhere/at/all"),
        (("generate", "x", "-f", "{missing}"), "not both"),
        (("generate", "-f", "{missing}"), "cannot read prompts"),
        (("generate", "-f", "{broken}"), "line 2"),
        (("verify", "--target", "{target}", "--draft", "{head}", "-f", "{single}"), "at least two"),
        (("verify", "--target", "{target}", "--draft", "{head}", "--temperature", 0), "temperature"),
        (("train", "-t", "{target}", "-f", "{missing}", "-o", "{out}", "--num-aux-layers", "2"), "cannot read prompts"),
        (("train", "-t", "{target}", "-f", "{single}", "-o", "{out}", "--target-layer-ids", "a"), "target_layer_ids"),
        (("train", "-t", "{target}", "-o", "{out}"), "prompts: none"),
        (
            ("train", "-t", "{target}", "-f", "{single}", "-o", "{out}", "--chat-template-kwargs", "x"),
            "must be a mapping",
        ),
        (("demo", "--target", "{target}", "--draft", "{head}", "--dtype", "float17"), "float17"),
    ],
)
def test_errors_are_one_line(folder: Path, tmp_path: Path, arguments: tuple[object, ...], message: str) -> None:
    (tmp_path / "broken.jsonl").write_text('{"prompt": "fine"}\n{"nothing": 1}\n')
    (tmp_path / "single.txt").write_text("only one\n")
    places = {
        "target": folder / "target",
        "head": folder / "head",
        "missing": tmp_path / "missing.txt",
        "broken": tmp_path / "broken.jsonl",
        "single": tmp_path / "single.txt",
        "out": tmp_path / "out",
    }
    result = call(*(str(a).format(**places) for a in arguments))
    assert result.exit_code == 1, result.output
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_wrong_option_is_a_usage_error() -> None:
    assert call("demo", "--tree-budget", 0).exit_code == 2
    assert call("dance").exit_code == 2


NOT_UTF_8 = b"name-\xff".decode("utf-8", "surrogateescape")


@pytest.mark.parametrize(
    ("command", "needed"),
    [
        ("demo", ()),
        ("generate", ("hello",)),
        ("train", ("-t", "{target}", "-f", "{prompts}", "-o", "{out}")),
        ("bench", ("-o", "{out}")),
        ("bench compare", ("{out}", "{out}")),
        ("bench report", ()),
        ("export", ("--draft", "{head}", "--to", "directory", "-o", "{out}")),
        ("verify", ()),
        ("inspect", ("hello",)),
    ],
)
def test_arguments_that_are_not_utf_8(folder: Path, tmp_path: Path, command: str, needed: tuple[str, ...]) -> None:
    """Python passes such bytes on as lone surrogates, which tokenizers, the hub and the terminal refuse."""
    (tmp_path / "prompts.txt").write_text("one\n")
    places = {"target": folder / "target", "head": folder / "head", "prompts": tmp_path / "prompts.txt"}
    given = [argument.format(out=tmp_path / "out", **places) for argument in needed]
    options = [
        option
        for parameter in command_of(command).params
        for option in parameter.opts[:1]
        if not getattr(parameter, "is_flag", False) and option.startswith("-") and parameter.name != "help"
    ]
    for bad in [[NOT_UTF_8], *([option, NOT_UTF_8] for option in options)]:
        result = call(*command.split(), *given, *bad)
        assert result.exit_code == 2, (bad, result.output)
        assert isinstance(result.exception, SystemExit)
        assert "not valid UTF-8" in " ".join(result.stderr.split()), bad
        assert "name-\\xff" in result.stderr
        assert result.stdout == ""
    assert not (tmp_path / "out").exists()


def command_of(name: str) -> Any:
    found: Any = get_command(app)
    for part in name.split():
        found = found.commands[part]
    return found


def test_standard_input_that_is_not_utf_8(folder: Path) -> None:
    result = call("generate", "--target", folder / "target", input=b"caf\xe9")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "standard input is not valid UTF-8" in result.stderr


@pytest.mark.parametrize("command", ["demo", "generate", "export", "verify", "inspect"])
def test_options_of_several_commands_have_one_short_form(command: str) -> None:
    shared = {"draft": "-d", "target": "-t", "max_tokens": "-n", "output": "-o", "prompts_file": "-f"}
    for parameter in command_of(command).params:
        if parameter.name in shared and parameter.param_type_name == "option":
            assert shared[parameter.name] in parameter.opts, parameter.name
        assert parameter.help, f"{parameter.name} has no help"
        assert parameter.help.endswith("."), parameter.help
