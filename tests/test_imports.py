"""What `lint-imports` cannot see: how long imports take, folders outside the package, the public names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "jetspec"


@pytest.mark.parametrize("statement", ["import jetspec", "import jetspec.cli", "from jetspec import JetSpecError"])
def test_imports_do_not_wait_for_torch(statement: str) -> None:
    code = f"{statement}\nimport sys\nassert not {{'torch', 'transformers'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)


def test_every_folder_is_a_package() -> None:
    assert all((path.parent / "__init__.py").is_file() for path in PACKAGE.rglob("*.py"))


def test_public_names() -> None:
    import jetspec

    for name in jetspec.__all__:
        assert getattr(jetspec, name) is not None
    assert set(dir(jetspec)) >= set(jetspec.__all__)
    with pytest.raises(AttributeError, match="nothing_here"):
        jetspec.nothing_here  # noqa: B018
