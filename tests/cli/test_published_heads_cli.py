"""The commands with a published head in a directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.cli import call
from tests.helpers.published_heads import LAYERS, Published, dflash, eagle3
from tests.helpers.tiny import TEXT_VOCAB_SIZE, tiny_llama, tiny_tokenizer

HEADS = {
    "EAGLE-3, in the layout of EAGLE": lambda: eagle3("EAGLE"),
    "EAGLE-3, in the layout of SpecForge": lambda: eagle3("SpecForge"),
    "EAGLE-3, in the layout of speculators": lambda: eagle3("speculators"),
    "DFlash, in the layout of speculators": lambda: dflash("speculators"),
    "Domino, in the layout of DFlash": lambda: dflash("DFlash", "Domino"),
    "DFlash, in the layout of DFlash": lambda: dflash("DFlash"),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    settings = {"vocab_size": TEXT_VOCAB_SIZE, "max_position_embeddings": 512, "num_hidden_layers": LAYERS}
    tiny_llama(**settings).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


FAST = {"EAGLE-3, in the layout of SpecForge", "Domino, in the layout of DFlash"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in HEADS])
def test_generate_drafts_and_inspect_names_the_family(name: str, target: Path, tmp_path: Path) -> None:
    published: Published = HEADS[name]()
    head = published.write(tmp_path)
    models = ("--target", target, "--draft", head, "--dtype", "float32")
    plain = call("generate", "Hello", "--target", target, "--draft", "none", "--max-tokens", 12, "--json")
    drafted = call("generate", "Hello", *models, "--max-tokens", 12, "--tree-budget", 8, "--json")
    assert drafted.exit_code == 0, drafted.output
    assert json.loads(drafted.stdout)["token_ids"] == json.loads(plain.stdout)["token_ids"]
    assert f"head: {name}" in " ".join(call("inspect", "Hello", *models, "--tree-budget", 8).stdout.split())
    data = json.loads(call("inspect", "Hello", *models, "--tree-budget", 8, "--json").stdout)
    assert len(data["nodes"]) == 8
    assert f"{data['head']['family']}, in the layout of {data['head']['layout']}" == name


def test_a_broken_head_is_refused_with_the_field_s_name(target: Path, tmp_path: Path) -> None:
    head = eagle3("SpecForge", norm_output=False).write(tmp_path)
    result = call("generate", "Hello", "--target", target, "--draft", head)
    assert result.exit_code == 1
    assert "norm_output=False" in result.stderr
