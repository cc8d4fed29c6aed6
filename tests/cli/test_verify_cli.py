"""`jetspec verify` on a tiny target and head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import jetspec.engine.accept as accept_module
from tests.helpers.cli import call, models, trusting_next_token


@pytest.mark.slow
def test_verify_passes_and_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The prompts that come with the command are long for a byte-level tokenizer.
    options = (*models(folder), "--max-tokens", 6, "--samples", 100, "--raw")
    good = call("verify", *options)
    assert good.exit_code == 0, good.output
    assert "differs" not in good.stdout
    monkeypatch.setattr(accept_module, "next_token", trusting_next_token)
    bad = call("verify", *options)
    assert bad.exit_code == 1
    for word in ("first difference", "position", "context", "plain", "draft", "token "):
        assert word in bad.stdout
    report = call("verify", *options, "--json")
    assert report.exit_code == 1
    data = json.loads(report.stdout)
    assert data["passed"] is False
    assert data["checks"][0]["difference"]["position"] == 1
