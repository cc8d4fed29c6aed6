"""`jetspec train` on a tiny target."""

from __future__ import annotations

import json
from pathlib import Path

from typer.main import get_command

from jetspec.cli import app
from tests.helpers.cli import call


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
