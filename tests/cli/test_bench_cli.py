"""`jetspec bench` on a tiny target. What reports hold is tested with them."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import jetspec.bench.run as run_module
from jetspec.bench.config import BenchConfig
from jetspec.bench.results import RESULTS
from jetspec.cli import app


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Stands for the reports, whose plots take time: says what it was called with."""
    module: Any = ModuleType("jetspec.bench.report")

    def write_reports(folder: Path) -> list[Path]:
        assert (folder / RESULTS).is_file()
        return [folder / "report.md"]

    module.check_libraries = lambda: None
    module.write_reports = write_reports
    module.show = lambda run, console: console.print(f"shown: {len(run.groups)} groups")
    module.compare = lambda runs: f"| compared: {', '.join(Path(name).name for name, _ in runs)} |"
    monkeypatch.setitem(sys.modules, "jetspec.bench.report", module)
    return module


@pytest.fixture
def options(models: dict[str, str], data: Path, tmp_path: Path) -> list[object]:
    names = ["--target", models["target"], "--draft", models["draft"], "--data", data, "--output", tmp_path / "run"]
    return [*names, "--num-prompts", 1, "--max-tokens", 4, "--budget", 4]


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def test_run_report_and_compare(options: list[object], tmp_path: Path) -> None:
    """With the real reports."""
    first = call(*options, "--batch-size", 1, "--batch-size", 2)
    assert first.exit_code == 0, first.output
    folder = tmp_path / "run"
    assert {path.name for path in folder.iterdir()} == {RESULTS, "report.md", "report.html"}
    assert "report.html" in first.stderr
    markdown = (folder / "report.md").read_text()
    for method in ("plain", "ngram", "jetspec"):
        assert method in first.stdout
        assert markdown.count(f"| {method} |") >= 2, "a row for each batch size"
    again = call("report", folder)
    assert (again.exit_code, again.stdout) == (0, first.stdout)
    both = call("compare", folder, folder)
    assert both.exit_code == 0
    assert "jetspec" in both.stdout


def test_a_missing_library_is_named_before_anything_runs(
    options: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("jetspec.bench.report.find_spec", lambda name: None if name == "matplotlib" else find(name))
    result = call(*options)
    assert result.exit_code == 1
    assert "need matplotlib: pip install 'jetspec[bench]'" in result.stderr
    assert not (tmp_path / "run").exists()


def test_json_is_the_figures_alone(report: ModuleType, options: list[object], tmp_path: Path) -> None:
    result = call(*options, "--method", "ngram", "--method", "jetspec", "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert [entry["cell"]["method"] for entry in printed["figures"]] == ["plain", "ngram", "jetspec"]
    assert printed["failures"] == []
    assert printed["reports"] == [str(tmp_path / "run" / "report.md")]


def test_a_failure_is_reported_and_ends_in_status_1(
    report: ModuleType, options: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    method = run_module.Models.method

    def broken(self: Any, cell: Any, lengths: Any) -> Any:
        if cell.method == "ngram":
            raise RuntimeError("out of order")
        return method(self, cell, lengths)

    monkeypatch.setattr(run_module.Models, "method", broken)
    result = call(*options)
    assert result.exit_code == 1
    assert "shown: 2 groups" in result.stdout
    assert "could not be measured" in result.stderr
    result = call(*options, "--json")
    assert [f["error"] for f in json.loads(result.stdout)["failures"]] == ["RuntimeError: out of order"]


def test_an_interrupt_says_how_to_go_on(
    report: ModuleType, options: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "run_block", stop)
    result = call(*options)
    assert result.exit_code == 130
    assert "the same command resumes the run" in result.stderr
    assert result.stdout == ""
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "output: is required"),
        (("--output", "x", "--method", "magic"), "methods.0='magic': must be one of"),
        (("--output", "x", "--method", "eagle"), "eagle: method eagle needs it"),
        (("--output", "x", "--budget", "many"), "budgets='many': must be auto or"),
        (("--output", "x", "--batch-size", 0), "batch_sizes.0=0: must be at least 1"),
        (("compare", "x"), "two or more"),
        (("report", "/nowhere/at/all"), "cannot read benchmark results"),
    ],
)
def test_errors_are_one_line(report: ModuleType, arguments: tuple[object, ...], message: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 1
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""


def test_a_wrong_option_is_a_usage_error() -> None:
    assert call("--num-prompts", -1).exit_code == 2
    assert call("--max-tokens", "many").exit_code == 2
    assert call("--dtype", "int8").exit_code == 2


def test_every_field_is_an_option(report: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The options set the fields, with names that may be repeated in the singular."""
    seen: list[BenchConfig] = []
    command = sys.modules["jetspec.cli.bench"]  # the package has the command itself under this name
    monkeypatch.setattr(command, "run_with_progress", lambda config: seen.append(config) or 1 / 0)
    words = (
        "-o out -t a -d b --eagle c --dflash d --draft-model e --dataset humaneval --dataset x,y.jsonl --data f "
        "--num-prompts 0 -n 3 -m jetspec -m eagle,dflash-tree -m draft-model -b 4 -b auto --temperature 0 "
        "--temperature 0.5 --batch-size 2 --run-code --device cpu --dtype float16"
    )
    call(*words.split(), "--chat-template-kwargs", '{"a": 1}')
    expected = BenchConfig(
        output=Path("out"),
        target="a",
        draft="b",
        eagle="c",
        dflash="d",
        draft_model="e",
        datasets=("humaneval", "x,y.jsonl"),
        data=Path("f"),
        num_prompts=0,
        max_tokens=3,
        methods=("plain", "jetspec", "eagle", "dflash-tree", "draft-model"),
        budgets=(4, "auto"),
        temperatures=(0.0, 0.5),
        batch_sizes=(2,),
        run_code=True,
        device="cpu",
        dtype="float16",
        chat_template_kwargs={"a": 1},
    )
    assert seen == [expected]
    assert all(getattr(expected, name) != field.default for name, field in BenchConfig.model_fields.items())


@pytest.mark.parametrize(
    "arguments",
    [
        ("--output", "x", "--dataset", "a\udcff"),
        ("--output", "a\udcff"),
        ("report", "a\udcff"),
        ("compare", "a", "a\udcff"),
    ],
)
def test_names_that_are_not_utf_8_are_usage_errors(arguments: tuple[str, ...]) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert r"a\xff" in result.output
    assert "UTF-8" in result.output


@pytest.mark.parametrize("command", [(), ("report",), ("compare",)])
def test_help_fits_80_columns(command: tuple[str, ...]) -> None:
    result = call(*command, "--help")
    assert result.exit_code == 0
    assert max(len(line) for line in result.stdout.splitlines()) <= 80
