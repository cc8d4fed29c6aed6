"""Two processes train what one trains, whatever the share of each; they stop together and resume exactly."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from jetspec.errors import JetSpecError
from jetspec.head import load_head
from jetspec.models.target import Target
from jetspec.train import TrainConfig, train
from jetspec.train.capture import CaptureSettings, capture
from jetspec.train.processes import Processes
from jetspec.train.prompts import Prompt

MakeConfig = Callable[..., TrainConfig]
ROOT = Path(__file__).parents[2]
# A step of one sequence leaves the second process without a block.
ONE_SEQUENCE = {"blocks_per_step": 1, "max_steps": 2}
RUNS = {
    "ddp": ("whole", {}),
    "ddp-killed": ("killed", {"checkpoint_every": 1}),
    "ddp-stopped": ("stopped", {}),
    "ddp-idle": ("whole", ONE_SEQUENCE),
    "fsdp": ("whole", {"fsdp": True}),
    "fsdp-killed": ("killed", {"fsdp": True, "checkpoint_every": 1}),
    "fsdp-idle": ("whole", {"fsdp": True, **ONE_SEQUENCE}),
}
SMALL = {"max_steps": 4, "eval_every": 4, "log_every": 1, "export": "last", "max_prompts": 8, "shard_sequences": 3}


def settings(folder: Path, prompts_file: Path, name: str, changes: dict) -> dict:
    base = {"target": "tiny", "prompts": str(prompts_file), "output": str(folder / name), "dtype": "float32"}
    shape = {"num_layers": 2, "block_size": 4, "num_aux_layers": 2, "max_tokens": 16, "learning_rate": 3e-3}
    size = {"blocks_per_step": 24, "blocks_per_sequence": 8, "eval_prompts": 3, "eval_max_tokens": 6}
    return {**base, **shape, **size, "eval_budgets": [4, 8], **SMALL, **changes}


@pytest.fixture(scope="module")
def runs(target: Target, prompts_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs: those of one process, and the same by two. All but `ddp` take over a capture."""
    folder = tmp_path_factory.mktemp("runs")
    train(TrainConfig(**settings(folder, prompts_file, "one", {})), target=target)
    for name in {"one-idle", *RUNS} - {"ddp"}:
        shutil.copytree(folder / "one" / "capture", folder / name / "capture")
    train(TrainConfig(**settings(folder, prompts_file, "one-idle", ONE_SEQUENCE)), target=target)
    work = [(scenario, settings(folder, prompts_file, name, changes)) for name, (scenario, changes) in RUNS.items()]
    (folder / "work.json").write_text(json.dumps(work))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launch, "-m", "tests.helpers.workers", folder / "work.json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def metrics(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def assert_close(left: Path, right: Path) -> None:
    for a, b in zip(metrics(left), metrics(right), strict=True):
        for name in ("loss", "grad_norm", "learning_rate"):
            assert a[name] == pytest.approx(b[name], rel=1e-4), (name, a["step"])
        assert a.get("depths") == b.get("depths")
    a, b = load_head(left).state_dict(), load_head(right).state_dict()
    for name in a:
        # Adam's first steps make much of the rounding of a gradient near zero, so a few weights may differ more.
        assert (a[name] - b[name]).abs().mean() < 1e-5, name


def assert_same(left: Path, right: Path) -> None:
    def logged(output: Path) -> list[dict]:
        return [{**line, "blocks_per_s": None} for line in metrics(output)]

    assert logged(left) == logged(right)
    a, b = load_head(left).state_dict(), load_head(right).state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("several", "one"), [("ddp", "one"), ("fsdp", "one"), ("ddp-idle", "one-idle"), ("fsdp-idle", "one-idle")]
)
def test_two_processes_train_what_one_trains(runs: Path, several: str, one: str) -> None:
    assert_close(runs / several, runs / one)


@pytest.mark.slow
@pytest.mark.parametrize(("cut", "uncut"), [("ddp-killed", "ddp"), ("ddp-stopped", "ddp"), ("fsdp-killed", "fsdp")])
def test_two_processes_resume_bit_identically(runs: Path, cut: str, uncut: str) -> None:
    assert_same(runs / cut, runs / uncut)


@pytest.mark.slow
def test_processes_share_the_capture(runs: Path) -> None:
    for one in (runs / "one" / "capture").glob("shard-*.safetensors"):
        a, b = load_file(one), load_file(runs / "ddp" / "capture" / one.name)
        assert all(torch.equal(a[name], b[name]) for name in a)
    names = [sorted(p.name for p in (runs / run / "capture").iterdir()) for run in ("one", "ddp")]
    assert names[0] == names[1]
    assert len(names[0]) == 1 + 2 * 3


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(runs: Path, target: Target, prompts_file: Path) -> None:
    """Two sharded processes reached step 4; one finds the same weights, optimizer and best step there."""
    changes = {"fsdp": False}
    result = train(TrainConfig(**settings(runs, prompts_file, "fsdp-killed", changes)), target=target)
    assert (result.steps, result.finished) == (4, True)
    assert_same(runs / "fsdp-killed", runs / "fsdp")


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("ACCELERATE_USE_FSDP", "true", "give jetspec --fsdp"),
        ("ACCELERATE_USE_DEEPSPEED", "true", "give jetspec --fsdp"),
        ("ACCELERATE_MIXED_PRECISION", "bf16", "give jetspec --precision bfloat16"),
    ],
)
def test_settings_of_the_launcher_are_not_ignored(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, fix: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(JetSpecError, match=fix):
        Processes.start("cpu")


def test_what_training_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(JetSpecError, match=r"pip install 'jetspec\[train\]'"):
        Processes.start("cpu")


def test_several_processes_choose_their_own_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.PartialState", lambda **_: SimpleNamespace(num_processes=2))
    with pytest.raises(JetSpecError, match="device='cuda:1': several processes share the devices"):
        Processes.start("cuda:1")


def test_a_folder_that_is_not_shared_is_refused(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Processes, "wait", lambda _self: None)
    with pytest.raises(JetSpecError, match="must be on a file system that all processes share"):
        capture(
            target,
            [Prompt((1, 2))],
            tmp_path / "own",
            CaptureSettings(target_layer_ids=(1,)),
            processes=Processes(1, 2),
        )
