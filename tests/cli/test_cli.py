"""The command line on a tiny target and head in a directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

import jetspec.engine.engine as engine_module
from jetspec import LLM, __version__
from jetspec.cli import app
from jetspec.cli.demo import PROMPTS
from jetspec.cli.inspect import Node, draw
from jetspec.head import head_for_target, save_head
from tests.helpers.tiny import TEXT_VOCAB_SIZE, tiny_llama, tiny_target, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`target` and `head`, saved."""
    folder = tmp_path_factory.mktemp("models")
    tiny_llama(vocab_size=TEXT_VOCAB_SIZE, max_position_embeddings=512).save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    target = tiny_target("llama", text=True, max_position_embeddings=512)
    head = head_for_target(target, num_layers=1, block_size=4, num_aux_layers=2, mask_token_id=TEXT_VOCAB_SIZE - 1)
    save_head(head, folder / "head")
    return folder


def call(*arguments: object, input: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], input=input)


def models(folder: Path, budget: int | str = 32) -> tuple[object, ...]:
    return ("--target", folder / "target", "--draft", folder / "head", "--tree-budget", budget)


def trusting_walk(tokens, parents, pick, **options):
    """A fault: takes the first draft token for the target's own choice."""
    return walk(tokens, parents, lambda row: tokens[parents.index(row)] if row in parents else pick(row), **options)


walk = engine_module.walk


def test_version() -> None:
    result = call("--version")
    assert (result.exit_code, result.stdout.strip()) == (0, f"jetspec {__version__}")


@pytest.mark.parametrize("command", ["demo", "generate", "train", "bench", "export", "verify", "inspect"])
def test_help_fits_80_columns(command: str) -> None:
    result = call(command, "--help")
    assert result.exit_code == 0
    assert max(len(line) for line in result.stdout.splitlines()) <= 80


def test_demo_prints_the_table(folder: Path) -> None:
    result = call("demo", *models(folder), "--max-tokens", 8)
    assert result.exit_code == 0, result.output
    for word in ("tokens per second", "acceptance length", "speed-up", "tokens identical", "yes"):
        assert word in result.stdout
    for prompt in PROMPTS:
        assert prompt[:40] in result.stdout


def test_demo_json_is_the_table_alone(folder: Path) -> None:
    result = call("demo", *models(folder), "--max-tokens", 8, "--json")
    assert result.exit_code == 0, result.output
    table = json.loads(result.stdout)
    keys = {"plain_tokens_per_s", "jetspec_tokens_per_s", "speedup", "acceptance_length", "identical"}
    assert set(table) == keys
    assert table["identical"] is True
    assert table["speedup"] == pytest.approx(table["jetspec_tokens_per_s"] / table["plain_tokens_per_s"], rel=0.05)
    assert table["acceptance_length"] >= 1


def test_demo_fails_where_tokens_differ(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "walk", trusting_walk)
    result = call("demo", *models(folder), "--max-tokens", 8, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["identical"] is False
    assert "differ" in result.stderr


def test_generate_streams_one_answer(folder: Path) -> None:
    text = call("generate", "Hello", *models(folder), "--max-tokens", 12, "--json")
    live = call("generate", "Hello", *models(folder), "--max-tokens", 12)
    assert live.exit_code == 0, live.output
    assert live.stdout == json.loads(text.stdout)["text"] + "\n"
    assert "12 tokens" in live.stderr


def test_generate_equals_plain_decoding(folder: Path) -> None:
    options = ("--max-tokens", 20, "--json", "--temperature", 0.9, "--seed", 3, "--raw", "--ignore-eos")
    drafted = call("generate", "one", "another one", *models(folder), *options)
    plain = call("generate", "one", "another one", "--target", folder / "target", "--draft", "none", *options)
    left, right = ([json.loads(line) for line in r.stdout.splitlines()] for r in (drafted, plain))
    assert [r["token_ids"] for r in left] == [r["token_ids"] for r in right]
    assert [r["completion_tokens"] for r in left] == [20, 20]
    assert [r["prompt"] for r in left] == ["one", "another one"]
    assert [r["prompt_tokens"] for r in left] == [3, 11]
    assert all(r["acceptance_length"] == 1 for r in right)


def test_chat_template_is_the_default(folder: Path) -> None:
    default, chat, raw = (
        json.loads(call("generate", "Hi", *models(folder), "--max-tokens", 2, "--json", *mode).stdout)["prompt_tokens"]
        for mode in ((), ("--chat",), ("--raw",))
    )
    assert default == chat > raw == 2


def test_switches_of_the_chat_template(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    render = LLM.render_chat
    monkeypatch.setattr(LLM, "render_chat", lambda self, m, switches=None: seen.append(switches) or render(self, m))
    options = ("generate", "Hi", *models(folder), "--max-tokens", 2, "--chat-template-kwargs")
    assert call(*options, '{"brief": true}').exit_code == 0
    assert seen == [{"brief": True}]
    for bad in ("brief", "[1]"):
        refused = call(*options, bad)
        assert refused.exit_code == 2
        assert "JSON object" in refused.stderr


def test_generate_reads_files_and_stdin(folder: Path, tmp_path: Path) -> None:
    plain, lines = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    plain.write_text("first\n\nsecond\n")
    lines.write_text('{"question": "first"}\n{"prompt": "second"}\n')
    options = (*models(folder), "--max-tokens", 3, "--json")
    from_text, from_lines = call("generate", "-f", plain, *options), call("generate", "-f", lines, *options)
    found = [[json.loads(line)["prompt"] for line in r.stdout.splitlines()] for r in (from_text, from_lines)]
    assert found == [["first", "second"]] * 2
    piped = call("generate", *options, input="from a pipe\n")
    assert json.loads(piped.stdout)["prompt"] == "from a pipe"


def test_verify_passes_and_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The prompts that come with the command are long for a byte-level tokenizer.
    options = (*models(folder), "--max-tokens", 6, "--samples", 100, "--raw")
    good = call("verify", *options)
    assert good.exit_code == 0, good.output
    assert "differs" not in good.stdout
    monkeypatch.setattr(engine_module, "walk", trusting_walk)
    bad = call("verify", *options)
    assert bad.exit_code == 1
    for word in ("first difference", "position", "context", "plain", "head", "token "):
        assert word in bad.stdout
    report = call("verify", *options, "--json")
    assert report.exit_code == 1
    data = json.loads(report.stdout)
    assert data["passed"] is False
    assert data["checks"][0]["difference"]["position"] == 1


def test_inspect_draws_the_tree(folder: Path) -> None:
    result = call("inspect", "Hello", *models(folder), "--round", 2)
    assert result.exit_code == 0, result.output
    assert "round 2" in result.stdout
    assert "newest token" in result.stdout
    assert "└╴" in result.stdout


def test_inspect_json_is_the_round(folder: Path) -> None:
    data = json.loads(call("inspect", "Hello", *models(folder), "--round", 2, "--json").stdout)
    nodes = data["nodes"]
    assert len(nodes) == 32
    assert nodes[0]["parent"] == -1
    for node in nodes[1:]:
        above = nodes[node["parent"]]
        assert node["path_probability"] == pytest.approx(above["path_probability"] * node["probability"], rel=1e-4)
        assert not node["accepted"] or above["accepted"]
    accepted = [node["token_id"] for node in nodes[1:] if node["accepted"]]
    assert data["new_token_ids"] == [*accepted, data["bonus"]["token_id"]]
    # The root is the newest token of what plain decoding has said so far.
    plain = call("generate", "Hello", *models(folder), "--max-tokens", 40, "--json")
    tokens = json.loads(plain.stdout)["token_ids"]
    start = tokens.index(nodes[0]["token_id"])
    assert tokens[start + 1 : start + 1 + len(data["new_token_ids"])] == data["new_token_ids"]


def test_deep_trees_fit_80_columns() -> None:
    from rich.console import Console

    chain = [Node(i, i - 1, 7, " word", 0.5, 0.5**i, i < 3) for i in range(16)]
    console = Console(width=80, record=True, color_system=None)
    with console.capture() as capture:
        console.print(draw(chain))
    lines = capture.get().splitlines()
    assert len(lines) == 16
    assert sum("accepted" in line for line in lines) == 2


def test_inspect_past_the_end(folder: Path) -> None:
    # 500 of the 512 positions of its context.
    result = call("inspect", "x" * 500, "--raw", *models(folder), "--round", 13)
    assert result.exit_code == 1
    assert "--round 13" in result.stderr


def test_train_options_are_those_of_the_configuration() -> None:
    from jetspec.train import TrainConfig

    options = {p.name for p in get_command(app).commands["train"].params}
    assert options - {"config", "json", "help"} == set(TrainConfig.model_fields)


def test_train_writes_a_head_that_the_others_take(folder: Path, tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.txt", tmp_path / "head"
    prompts.write_text("".join(f"prompt number {i}\n" for i in range(12)))
    shape = ("--num-layers", 1, "--num-aux-layers", 2, "--target-layer-ids", "1,3", "--block-size", 3)
    size = ("--max-tokens", 8, "--max-steps", 3, "--eval-prompts", 2, "--eval-max-tokens", 6)
    result = call("train", "-t", folder / "target", "-f", prompts, "-o", output, *shape, *size, "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert (data["steps"], data["finished"]) == (3, True)
    config = json.loads((output / "config.json").read_text())
    assert config["dflash_config"]["target_layer_ids"] == [1, 3]
    used = call("generate", "Hello", "--target", folder / "target", "--draft", output, "--max-tokens", 4, "--json")
    assert used.exit_code == 0, used.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "x", "--target", "{target}"), "no head is shipped"),
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
        (("train", "-t", "{target}", "-f", "{single}", "-o", "{out}", "--chat-template-kwargs", "x"), "not valid JSON"),
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


def test_prompt_files_are_cut_at_newlines_only(tmp_path: Path) -> None:
    from jetspec.prompts import read_prompts

    records, lines = tmp_path / "p.jsonl", tmp_path / "p.txt"
    records.write_text(json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False) + "\n", encoding="utf-8-sig")
    lines.write_text("a\x0cb\u2028c\r\nd\n", encoding="utf-8-sig", newline="")
    assert read_prompts(records) == ["a\u2028b"]
    assert read_prompts(lines) == ["a\x0cb\u2028c", "d"]


@pytest.mark.parametrize("method", ["tree", "chain", "model", "ngram"])
def test_generate_with_every_draft_method(folder: Path, method: str) -> None:
    draft = {"model": ("--draft", folder / "target"), "ngram": ()}.get(method, ("--draft", folder / "head"))
    common = ("--target", folder / "target", "--max-tokens", 8, "--json", "abc abc")
    drafted = call("generate", *draft, "--draft-method", method, "--tree-budget", 6, *common)
    assert drafted.exit_code == 0, drafted.output
    plain = call("generate", "--draft", "none", *common)
    assert json.loads(drafted.stdout)["token_ids"] == json.loads(plain.stdout)["token_ids"]


def test_generate_refuses_unknown_methods_and_budgets(folder: Path) -> None:
    assert "draft_method" in call("generate", *models(folder), "--draft-method", "magic", "abc").output
    assert call("generate", *models(folder, "many"), "abc").exit_code == 2
