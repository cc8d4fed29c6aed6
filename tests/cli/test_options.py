"""Every shared option of the commands that take it: it reaches what it sets."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from jetspec import LLM
from jetspec.cli.options import EngineOptions
from jetspec.engine.config import EngineConfig
from jetspec.head import load_head
from tests.helpers.cli import call

#: What each command needs beside the models. Prompts are short: the tokenizer of the tests is byte-level.
NEEDED: dict[str, tuple[object, ...]] = {
    "generate": ("Hello", "--max-tokens", 3),
    "verify": ("--max-tokens", 3, "--samples", 100, "--raw"),
    "inspect": ("Hello",),
    "demo": ("--max-tokens", 3),
}
OF_ENGINE = [
    ("--tree-budget", 5, {"tree_budget": 5}),
    ("--batch-invariant", None, {"batch_invariant": True}),
    ("--max-num-seqs", 3, {"max_num_seqs": 3}),
    ("--max-num-batched-tokens", 96, {"max_num_batched_tokens": 96}),
    ("--kv-block-size", 4, {"kv_block_size": 4}),
]
OF_DRAFT = [
    ("--draft-method", "chain", {"draft_method": "chain"}),
    ("--head-window", 20, {"head_window": 20}),
    ("--causal", None, {"head_causal": True}),
]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of every `LLM` that a command makes."""
    found: list[dict[str, Any]] = []
    init = LLM.__init__

    def record(self: LLM, model: Any, draft: Any = "auto", **settings: Any) -> None:
        found.append({"draft": draft, **settings})
        init(self, model, draft, **settings)

    monkeypatch.setattr(LLM, "__init__", record)
    return found


def run(command: str, folder: Path, *options: object) -> str:
    names = ("--target", folder / "target", "--draft", folder / "head")
    result = call(command, *NEEDED[command], *names, *(o for o in options if o is not None))
    assert result.exit_code == 0, result.output
    return result.stdout


#: Verify runs every prompt many times.
COMMANDS = [pytest.param(c, marks=pytest.mark.slow) if c == "verify" else c for c in NEEDED]


@pytest.mark.parametrize("command", ["generate", pytest.param("verify", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("option", "value", "expected"), OF_ENGINE)
def test_options_of_the_engine(
    folder: Path, made: list[dict[str, Any]], command: str, option: str, value: object, expected: dict[str, Any]
) -> None:
    run(command, folder, option, value)
    assert made
    for settings in made:  # of `verify`, plain decoding and the draft alike
        assert settings.items() >= expected.items()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("option", "value", "expected"), OF_DRAFT)
def test_options_of_the_draft(
    folder: Path, made: list[dict[str, Any]], command: str, option: str, value: object, expected: dict[str, Any]
) -> None:
    run(command, folder, option, value)
    assert made[-1].items() >= expected.items()
    assert all(settings["draft"] is None for settings in made[:-1])


@pytest.mark.parametrize("command", COMMANDS)
def test_chat_template_kwargs(folder: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    seen: list[object] = []
    render = LLM.render_chat
    monkeypatch.setattr(LLM, "render_chat", lambda self, m, kwargs=None: seen.append(kwargs) or render(self, m))
    options = (*(o for o in NEEDED[command] if o != "--raw"), "--target", folder / "target", "--draft", folder / "head")
    assert call(command, *options, "--chat-template-kwargs", '{"brief": true}').exit_code == 0
    assert seen
    assert all(kwargs == {"brief": True} for kwargs in seen)
    for bad in ("brief", "[1]"):
        refused = call(command, *options, "--chat-template-kwargs", bad)
        assert refused.exit_code == 2
        assert "JSON object" in " ".join(refused.stderr.split())


@pytest.mark.parametrize("command", [*COMMANDS, "export"])
def test_a_head_without_a_causal_flag(folder: Path, unflagged: Path, tmp_path: Path, command: str) -> None:
    """`--causal` or `--bidirectional` answers what the head's configuration leaves open."""
    needed = NEEDED.get(command, ("--to", "directory", "--output", tmp_path / "out"))
    target = () if command == "export" else ("--target", folder / "target")
    for option in ("--causal", "--bidirectional"):
        result = call(command, *needed, *target, "--draft", unflagged, option)
        assert result.exit_code == 0, result.output
        if command == "export":
            assert load_head(tmp_path / "out").config.causal is (option == "--causal")


@pytest.mark.parametrize("command", ["generate", "inspect", "demo"])
def test_raw_and_chat(folder: Path, made: list[dict[str, Any]], command: str) -> None:
    """`demo` always chats where the target has a chat template; the others take the choice."""
    if command == "demo":
        assert call("demo", "--raw").exit_code == 2
        return
    shown = [run(command, folder, mode, "--json") for mode in ("--chat", "--raw")]
    assert json.loads(shown[0]) != json.loads(shown[1])


def test_options_of_the_engine_have_the_defaults_and_limits_of_its_configuration() -> None:
    hints = get_type_hints(EngineOptions, include_extras=True)
    for field in fields(EngineOptions):
        known = EngineConfig.model_fields[field.name]
        [declared] = hints[field.name].__metadata__
        limits = [fact.ge for fact in known.metadata if hasattr(fact, "ge")]
        assert (field.default, declared.min) == (known.default, limits[0] if limits else None), field.name
