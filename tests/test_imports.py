"""Imports point one way, and importing the package or the command line does not wait for torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "jetspec"

# What each part may import of the others. `errors` and the leaves know nothing of the rest.
LEAVES = {"errors", "digest"}
MODEL = {"attention", "tree", "sampling", "detokenize"} | LEAVES
ENGINE = {"engine", "head", "target", "exact", "packing"} | MODEL
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "digest": set(),
    "tree": LEAVES,
    "sampling": {"tree"} | LEAVES,
    "detokenize": LEAVES,
    "attention": {"tree"} | LEAVES,
    "exact": {"attention"} | LEAVES,
    "target": {"attention", "exact"} | LEAVES,
    "packing": LEAVES,
    "head": {"attention", "tree", "target"} | LEAVES,
    "engine": ENGINE,
    "outputs": ENGINE,
    "dispatcher": {"outputs"} | ENGINE,
    "inputs": ENGINE,
    "llm": {"dispatcher", "inputs", "outputs", "prompts"} | ENGINE,
    "async_llm": {"llm", "dispatcher", "inputs", "outputs"} | ENGINE,
    "verify": {"llm"} | ENGINE,
    "prompts": LEAVES,
    "train": {"llm", "prompts"} | ENGINE,
    "export": {"head"} | LEAVES,
    "serve": {"llm", "async_llm", "inputs", "outputs"} | ENGINE,
    "bench": {"__init__", "llm", "prompts"} | ENGINE,
    "cli": {"__init__", "llm", "prompts", "verify", "train", "export", "serve", "bench"} | ENGINE,
    "__main__": {"cli"},
    "__init__": {"llm", "async_llm"} | ENGINE,
}


def part_of(path: Path) -> str:
    """The part a file belongs to: its folder or file name under the package."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(source: str, path: Path) -> Iterator[str]:
    """Parts of jetspec that a module imports, at any depth of its code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "jetspec" else [module]
        else:
            continue
        for name in names:
            pieces = name.split(".")
            if pieces[0] == "jetspec":
                is_part = len(pieces) > 1 and (
                    (PACKAGE / pieces[1]).is_dir() or (PACKAGE / f"{pieces[1]}.py").is_file()
                )
                yield pieces[1] if is_part else "__init__"


def violations(source: str, path: Path) -> set[str]:
    part = part_of(path)
    return set(imported_parts(source, path)) - ALLOWED[part] - {part}


MODULES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_directions(path: Path) -> None:
    assert part_of(path) in ALLOWED, f"{path}: say in ALLOWED what it may import"
    assert not violations(path.read_text(encoding="utf-8"), path)


def test_directions_allow_no_cycle() -> None:
    done: set[str] = set()
    while len(done) < len(ALLOWED):
        ready = {part for part, below in ALLOWED.items() if part not in done and below - {part} <= done}
        assert ready, f"a cycle among {set(ALLOWED) - done}"
        done |= ready


@pytest.mark.parametrize(
    ("source", "part", "found"),
    [
        ("from jetspec.engine import Engine", "tree/x.py", {"engine"}),
        ("def f():\n    import jetspec.cli.demo", "llm.py", {"cli"}),
        ("from jetspec import train", "verify.py", {"train"}),
        ("from jetspec import LLM", "engine/x.py", {"__init__"}),
        ("from jetspec.tree.build import Forest", "engine/x.py", set()),
    ],
)
def test_a_wrong_import_is_found(source: str, part: str, found: set[str]) -> None:
    assert violations(source, PACKAGE / part) == found


def test_tree_is_pure() -> None:
    for path in (PACKAGE / "tree").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {n.split(".")[0] for n in names} & {"transformers", "huggingface_hub", "safetensors"}


def test_every_folder_is_a_package() -> None:
    assert all((path.parent / "__init__.py").is_file() for path in MODULES)


@pytest.mark.parametrize("statement", ["import jetspec", "import jetspec.cli", "from jetspec import JetSpecError"])
def test_quick_imports(statement: str) -> None:
    code = f"{statement}\nimport sys\nassert not {{'torch', 'transformers'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)


def test_public_names() -> None:
    import jetspec
    from jetspec.async_llm import AsyncLLM
    from jetspec.llm import LLM
    from jetspec.sampling import SamplingParams, StructuredOutputsParams

    assert jetspec.LLM is LLM
    assert jetspec.AsyncLLM is AsyncLLM
    assert jetspec.SamplingParams is SamplingParams
    assert jetspec.StructuredOutputsParams is StructuredOutputsParams
    with pytest.raises(AttributeError, match="nothing_here"):
        jetspec.nothing_here  # noqa: B018
