"""docs/targets.md holds what the families' tiny models do, as seen when the table is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.layers import FAMILIES
from tests.helpers.targets import OTHERS, REFUSED, row

PAGE = Path(__file__).parents[2] / "docs" / "targets.md"


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({*OTHERS, *FAMILIES, *REFUSED}))
def test_the_row_of_a_family_is_what_was_seen(family: str) -> None:
    """To write the table anew: python -m tests.helpers.targets"""
    assert row(family) in PAGE.read_text(encoding="utf-8").splitlines()


def test_every_row_is_of_a_family_that_is_run() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert {line.split("`")[1] for line in rows} == {*OTHERS, *FAMILIES, *REFUSED}
