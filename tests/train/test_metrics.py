"""Numbers reach the metrics file and the trackers; a run that goes on continues both."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event

from jetspec.errors import JetSpecError
from jetspec.models.target import Target
from jetspec.train import TrainConfig, train

MakeConfig = Callable[..., TrainConfig]
SMALL = {"max_steps": 4, "eval_every": 2, "log_every": 1, "eval_prompts": 2, "max_prompts": 4, "max_tokens": 8}


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) by name, as TensorBoard's files hold them."""
    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.glob("events.*")):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def test_tensorboard_gets_what_the_file_gets(target: Target, make_config: MakeConfig) -> None:
    config = make_config(log_with="tensorboard", **SMALL)
    train(config, target=target)
    lines = [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]
    logged = events(config.folder / "tensorboard")
    assert logged["loss"] == [(line["step"], pytest.approx(line["loss"])) for line in lines]
    measured = [line for line in lines if "depths" in line]
    assert [line["step"] for line in measured] == [2, 4]
    for name, pick in {
        "acceptance_length/8": lambda line: line["acceptance_length"]["8"],
        "depths/4/1": lambda line: line["depths"]["4"][0],
    }.items():
        assert logged[name] == [(line["step"], pytest.approx(pick(line))) for line in measured]


def test_a_run_that_goes_on_continues_its_wandb_run(
    target: Target, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, Any]] = []
    logged: list[tuple[int, dict]] = []
    run = SimpleNamespace(log=lambda values, step: logged.append((step, values)), finish=lambda: None)
    fake = SimpleNamespace(init=lambda **options: started.append(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr("jetspec.train.run.check_tracker", lambda _name: None)
    assert not train(make_config(log_with="wandb", max_minutes=1e-9, **SMALL), target=target).finished
    assert train(make_config(log_with="wandb", **SMALL), target=target).finished
    assert [step for step, _ in logged] == [1, 2, 3, 4]
    assert logged[1][1].keys() >= {"loss", "acceptance_length/4", "depths/8/3"}
    first, second = started
    assert first["id"] == second["id"]
    assert second["resume"] == "allow"
    assert second["config"]["block_size"] == 4


def test_a_missing_tracker_is_named(target: Target, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.utils.is_wandb_available", lambda: False)
    with pytest.raises(JetSpecError, match="log_with='wandb': not installed; `pip install wandb`"):
        train(make_config(log_with="wandb"), target=target)
