"""A configuration from a file, from flags and from Python is checked in one place."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import jetspec.train.run as run_module
from jetspec.cli import app
from jetspec.cli.config_command import read_values
from jetspec.errors import JetSpecError
from jetspec.head import load_head
from jetspec.models.target import Target
from jetspec.train import TrainConfig

NEEDED = {"target": "t", "prompts": "p", "output": "o"}


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """The configurations that the command would have trained with."""
    configs: list[TrainConfig] = []

    def train(config: TrainConfig, **_: Any) -> None:
        configs.append(config)
        raise JetSpecError("not trained")

    monkeypatch.setattr(run_module, "train", train)
    return configs


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


def test_flags_win_over_the_file(tmp_path: Path, configured: list[TrainConfig]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "target: t\nprompts: p\noutput: o\nlearning_rate: 1e-4\nepochs: 2\neval_budgets: [8, 32]\n"
        "causal: false\nmask_token: 7\nmax_steps: null\n"
    )
    call("--config", file, "--epochs", 6, "--eval-budgets", "4", "--target-layer-ids", "1,3")
    assert configured == [
        TrainConfig(
            **NEEDED,
            learning_rate=1e-4,
            epochs=6,
            eval_budgets=(4,),
            causal=False,
            mask_token=7,
            target_layer_ids=(1, 3),
        )
    ]


def test_the_resolved_configuration_and_the_command_reproduce_it(tmp_path: Path, configured: list[TrainConfig]) -> None:
    config = TrainConfig(
        **{**NEEDED, "output": str(tmp_path / "a b")},
        causal=False,
        fsdp=True,
        eval_budgets=(4, 8),
        gamma=2.5,
        chat=False,
        chat_template_kwargs={"enable_thinking": False},
    )
    file = tmp_path / "train_config.json"
    file.write_text(json.dumps(config.to_dict()))
    call("--config", file)
    call(*shlex.split(config.command())[2:])
    assert configured == [config, config]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch: 3", "epoch: is not a field of TrainConfig; did you mean epochs?"),
        ("xyzzy: 3", "xyzzy: is not a field of TrainConfig"),
        ("epochs: many", "epochs='many': must be an integer"),
        ("epochs: true", "epochs=True: must be an integer"),
        ("epochs: 1.5", "epochs=1.5: must be an integer"),
        ("causal: 1", "causal=1: must be True or False"),
        ("warmup: 2", "warmup=2: must be at most 1"),
        ("gamma: 0", "gamma=0: must be above 0"),
        ("gamma: .nan", "gamma=nan: must be above 0"),
        ("eval_budgets: [0]", "eval_budgets.0=0: must be at least 1"),
        ("eval_budgets: []", "eval_budgets=(): must hold at least 1"),
        ("target_layer_ids: 1,x", "target_layer_ids.1='x': must be an integer"),
        ("chat_template_kwargs: '{'", "chat_template_kwargs='{': must be a mapping"),
        ("precision: float64", "precision='float64': must be one of 'float32' or 'bfloat16'"),
        ("output: null", "output=None: must be text"),
        ("{}", "target: is required"),
        ("- 1", "must hold fields and values"),
        ("a: [", "config: cannot read"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, configured: list[TrainConfig], text: str, message: str) -> None:
    file = tmp_path / "run.yaml"
    rest = (
        ""
        if text.startswith(("-", "a:", "{"))
        else f"\ntarget: t\nprompts: p\n{'' if 'output' in text else 'output: o'}"
    )
    file.write_text(text + rest)
    result = call("--config", file)
    assert result.exit_code == 1
    assert message in result.stderr
    assert not configured


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{'target': 1}")
    for name in ("absent.yaml", "broken.json"):
        with pytest.raises(JetSpecError, match=f"config: cannot read .*{name}"):
            read_values(tmp_path / name)


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, 256),
        ({"transition_size": 0}, 0),
        ({"transition_size": 8}, 8),
        ({"causal": False}, 0),
        ({"causal": False, "transition_size": 8}, 8),
        ({"kind": "autoregressive"}, 0),
        ({"kind": "autoregressive", "transition_size": 0}, 0),
    ],
)
def test_causal_parallel_heads_have_a_transition_by_default(options: dict, size: int) -> None:
    assert TrainConfig(**NEEDED, **options).transition_size == size


def test_the_default_reaches_the_head(target: Target, make_config: Callable[..., TrainConfig]) -> None:
    config = make_config(transition_size=None, max_steps=1, eval_prompts=0)
    run_module.train(config, target=target)
    assert load_head(config.folder).config.transition_size == 256


@pytest.mark.parametrize("field", ["temperature", "loss_temperature", "learning_rate", "weight_decay"])
def test_infinite_numbers_that_would_spoil_the_training_are_refused(field: str) -> None:
    with pytest.raises(JetSpecError, match=f"{field}=inf: must be a finite number"):
        TrainConfig(**NEEDED, **{field: float("inf")})
