"""The whole run: it learns, resumes bit-identically, exports what it trained."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from jetspec.errors import JetSpecError
from jetspec.head import AutoregressiveHead, load_head
from jetspec.models.target import Target
from jetspec.train import StepInfo, TrainConfig, train
from jetspec.train.schedule import DataOrder, learning_rate
from tests.helpers.tiny import tiny_target
from tests.helpers.training import Trained

MakeConfig = Callable[..., TrainConfig]
SHORT = {"export": "last", "max_steps": 4, "max_prompts": 4, "eval_prompts": 2, "max_tokens": 8}


def losses(output: Path) -> list[tuple]:
    """What a run logged, without times."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [[r.get(name) for name in ("step", "loss", "learning_rate", "acceptance_length", "depths")] for r in lines]


def assert_same_run(left: Path, right: Path) -> None:
    a, b = load_head(left).state_dict(), load_head(right).state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert losses(left) == losses(right)


class KilledError(Exception):
    pass


def kill_at(step: int) -> Callable[[StepInfo], None]:
    def watch(info: StepInfo) -> None:
        if info.step == step:
            raise KilledError

    return watch


@pytest.mark.slow
def test_training_on_200_prompts_makes_the_loss_fall(trained: Trained) -> None:
    seen = trained.losses
    assert trained.result.finished
    assert trained.result.steps == len(seen) == trained.config.max_steps
    assert sum(seen[-10:]) < 0.8 * sum(seen[:10])


@pytest.mark.parametrize("kind", ["qwen3", *(pytest.param(k, marks=pytest.mark.slow) for k in ("qwen3_moe", "gemma3"))])
def test_every_family_is_trained_for(kind: str, make_config: MakeConfig) -> None:
    target = tiny_target(kind, text=True)
    init = "random" if kind == "gemma3" else "target"  # its norms lie elsewhere
    config = make_config(max_steps=12, eval_every=12, transition_size=8, init=init)
    seen: list[float] = []
    result = train(config, target=target, watch=lambda info: seen.append(info.loss))
    assert result.finished
    assert sum(seen[-3:]) < sum(seen[:3])
    head = load_head(config.folder)
    assert head.transition is not None
    assert bool(head.transition.out_proj.weight.any()), "the transition was not trained"
    # The measurement's answers are the engine's, and the target's own whatever the budget.
    assert [m.tree_budget for m in result.measured] == [4, 8]


def test_a_trained_head_can_be_trained_on(target: Target, make_config: MakeConfig) -> None:
    first = make_config("first", max_steps=4, eval_prompts=0)
    train(first, target=target)
    start = load_head(first.folder)
    longer = {"init": str(first.folder), "transition_size": 8, "block_size": 6, "eval_prompts": 0}
    again = make_config("again", max_steps=1, learning_rate=1e-12, **longer)
    train(again, target=target)
    head = load_head(again.folder)
    assert head.config.block_size == 6
    assert head.config.mask_token_id == start.config.mask_token_id
    for name, tensor in start.state_dict().items():
        torch.testing.assert_close(head.state_dict()[name], tensor, rtol=0, atol=1e-6)
    with pytest.raises(JetSpecError, match=r"init: the trained head's num_hidden_layers is 2, the new one's 1"):
        train(make_config("other", num_layers=1, **longer), target=target)
    for size in (0, 4):  # neither is a trained transition dropped nor replaced
        third = make_config("third", **{**longer, "init": str(again.folder), "transition_size": size})
        with pytest.raises(JetSpecError, match=rf"init: the trained head's transition_size is 8, the new one's {size}"):
            train(third, target=target)
        assert not (third.folder / "capture").exists(), "it is refused before the work starts"
    card = (again.folder / "README.md").read_text()
    assert f"Initial weights: those of the head `{first.folder}`" in card
    assert "A transition of 8 numbers" in card
    assert f"--prompts {Path(again.prompts).name} " in card


def test_an_output_that_is_no_directory_is_refused(target: Target, make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(JetSpecError, match="output: cannot make the directory"):
        train(make_config(output=str(tmp_path / "file")), target=target)


@pytest.mark.parametrize("kind", ["parallel", pytest.param("autoregressive", marks=pytest.mark.slow)])
def test_a_killed_run_resumes_bit_identically(target: Target, make_config: MakeConfig, kind: str) -> None:
    config = make_config("whole", export="last", log_every=1, kind=kind)
    train(config, target=target)
    # A checkpoint every 3 steps and with every measurement; killed after one and, with a line logged, after another.
    killed = make_config("killed", export="last", log_every=1, checkpoint_every=3, kind=kind)
    for step in (5, 6):
        with pytest.raises(KilledError):
            train(killed, target=target, watch=kill_at(step))
    result = train(killed, target=target)
    assert result.steps == 8
    assert_same_run(config.folder, killed.folder)


@pytest.mark.slow
def test_resuming_after_sigkill(target: Target, make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config("whole", **SHORT)
    train(config, target=target)
    script = tmp_path / "victim.py"
    script.write_text(
        "import os, signal, sys\n"
        "import torch\n"
        f"torch.set_num_threads({torch.get_num_threads()})\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from jetspec.train import TrainConfig, train\n"
        "from tests.helpers.tiny import tiny_target\n"
        f"settings = {config.to_dict()!r}\n"
        f"settings.update(output={str(tmp_path / 'killed')!r}, checkpoint_every=1)\n"
        "watch = lambda info: os.kill(os.getpid(), signal.SIGKILL) if info.step == 2 else None\n"
        "train(TrainConfig(**settings), target=tiny_target(text=True, seed=3), watch=watch)\n"
    )
    victim = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert victim.returncode == -signal.SIGKILL, victim.stderr
    steps: list[int] = []
    train(make_config("killed", **SHORT), target=target, watch=lambda info: steps.append(info.step))
    assert steps == [3, 4]
    assert_same_run(config.folder, tmp_path / "killed")


@pytest.mark.parametrize(
    "change",
    [{"learning_rate": 1e-2}, {"seed": 1}, {"max_steps": 9}, {"gamma": 1.0}, {"blocks_per_step": 9}, {"max_tokens": 9}],
)
def test_another_configuration_cannot_resume(target: Target, finished: Trained, change: dict) -> None:
    with pytest.raises(JetSpecError, match=f"^{next(iter(change))}: the run in"):
        train(finished.config.replace(**change), target=target)


def test_the_exported_head_is_the_trained_one(target: Target, make_config: MakeConfig) -> None:
    config = make_config()
    result = train(config, target=target)
    head = load_head(config.folder)
    aux_hidden_states = torch.randn(9, 2 * target.hidden_size, generator=torch.Generator().manual_seed(0))
    block = target.embed(torch.tensor([[1, head.config.mask_token_id, head.config.mask_token_id]]))
    from jetspec.train.checkpoint import load_best

    trained = load_head(config.folder)
    trained.load_state_dict(load_best(config.folder / "checkpoint", result.exported_step))
    outputs = [
        target.lm_head(h.forward_train(h.context(aux_hidden_states), block, torch.tensor([9]))) for h in (head, trained)
    ]
    assert torch.equal(*outputs)
    assert "acceptance length" in (config.folder / "README.md").read_text().lower()
    measured = [line[3]["4"] for line in losses(config.folder) if line[3] is not None]
    assert result.measured[0].acceptance_length == max(measured)
    assert head.config.mask_token_id not in target.eos_token_ids
    assert head.config.mask_token_id == len(target.tokenizer)


def test_an_autoregressive_head_learns_and_is_exported_as_one(target: Target, make_config: MakeConfig) -> None:
    config = make_config(kind="autoregressive", num_layers=1, max_steps=25, eval_every=25)
    seen: list[float] = []
    result = train(config, target=target, watch=lambda info: seen.append(info.loss))
    assert sum(seen[-5:]) < 0.8 * sum(seen[:5])
    head = load_head(config.folder)
    assert isinstance(head, AutoregressiveHead)
    assert head.config.num_hidden_layers == 1
    assert len(result.measured[0].depths) == 3
    card = (config.folder / "README.md").read_text()
    assert "autoregressive,\n3 tokens ahead, target layers" in card
    assert "--kind autoregressive" in card
    # It goes on from a head of its own kind only.
    again = make_config("again", kind="autoregressive", num_layers=1, init=str(config.folder), max_steps=1)
    assert train(again, target=target).finished
    with pytest.raises(JetSpecError, match="init: the trained head's kind is 'autoregressive'"):
        train(make_config("other", num_layers=1, init=str(config.folder), max_steps=1), target=target)


def test_export_in_bfloat16_and_without_held_out_prompts(target: Target, make_config: MakeConfig) -> None:
    config = make_config(dtype="bfloat16", eval_prompts=0, max_steps=2)
    result = train(config, target=target)
    assert load_head(config.folder).dtype == torch.bfloat16
    assert result.exported_step == 2
    assert "acceptance was not measured" in (config.folder / "README.md").read_text()


def test_a_time_limit_stops_the_run_which_then_goes_on(target: Target, make_config: MakeConfig) -> None:
    whole = make_config("whole", **SHORT)
    train(whole, target=target)
    first = train(make_config("limited", max_minutes=1e-9, **SHORT), target=target)
    assert (first.steps, first.num_steps, first.finished) == (1, 4, False)
    assert train(make_config("limited", **SHORT), target=target).finished
    assert_same_run(whole.folder, make_config("limited").folder)


def test_schedule() -> None:
    rates = [learning_rate(s, 100, peak=2.0, floor=0.1, warmup=0.1) for s in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == rates[10] == 2.0
    assert rates[-1] == pytest.approx(0.2)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    order = DataOrder([2, 2, 2], 4, seed=0, epochs=2)
    assert [order.step(s)[0] for s in range(order.num_steps)] == [0, 0, 1, 1]
    assert DataOrder([2, 2, 2], 4, seed=0, epochs=1, max_steps=7).step(6)[0] == 3
    with pytest.raises(JetSpecError, match="prompts: no answer"):
        DataOrder([0, 0], 4, seed=0, epochs=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 1}, "block_size=1: must be at least 2"),
        ({"learning_rate": 0.0}, "learning_rate=0.0: must be above 0"),
        ({"warmup": 2.0}, "warmup=2.0: must be at most 1"),
        ({"kind": "eagle"}, "kind='eagle': must be one of 'parallel' or 'autoregressive'"),
        ({"kind": "autoregressive", "causal": False}, "causal=False: is for kind='parallel'"),
        ({"kind": "autoregressive", "mask_token": 5}, "mask_token=5: is for kind='parallel'"),
        ({"export": "first"}, "export='first': must be one of 'best' or 'last'"),
    ],
)
def test_a_configuration_names_its_bad_field(make_config: MakeConfig, change: dict, message: str) -> None:
    with pytest.raises(JetSpecError, match=message):
        make_config(**change)
