"""A target that computes NaN is named as the cause, wherever it begins; a run that diverges names the learning rate."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from jetspec.errors import JetSpecError
from jetspec.models.target import Target
from jetspec.train import TrainConfig, measure_acceptance, train
from jetspec.train.answers import AnswerStore, EngineAnswers
from jetspec.train.capture import CaptureSettings, capture
from jetspec.train.dataset import CapturedSequences
from jetspec.train.prompts import Ask, Prompt
from jetspec.train.step import GradientStep
from tests.helpers.tiny import tiny_target

MakeConfig = Callable[..., TrainConfig]
GIVEN = [Prompt((5, 6, 7), (8, 9, 10)), Prompt((4, 5, 6), (7, 200, 9))]
WRITTEN = [Prompt((5, 6, 7)), Prompt((4, 200, 6))]


def poison(where: str, value: float) -> Target:
    """A target one of whose weights is not finite; token 200 meets it alone where it is the embedding's."""
    target = tiny_target(text=True, seed=3)
    model = target.model.get_decoder()
    weight = {
        "embedding": model.embed_tokens.weight,
        "layer": model.layers[2].mlp.down_proj.weight,
        "norm": model.norm.weight,
        "lm_head": target.model.get_output_embeddings().weight,
    }[where]
    with torch.no_grad():
        weight[200 if where == "embedding" else 1] = value
    return target


CAUSES = {
    "embedding": r"training prompt 2: the target's hidden states are not finite after layer 1\b",
    "layer": r"training prompt 1: the target's hidden states are not finite after layer 3\b",
    "norm": r"training prompt 1: the target's hidden states are not finite after the final norm",
    "lm_head": "training prompt 1: the target's logits at position [0-9]+ are not finite",
}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("prompts", [GIVEN, WRITTEN], ids=["given", "written"])
@pytest.mark.parametrize("where", CAUSES)
def test_capture_or_training_names_the_target(
    make_config: MakeConfig, tmp_path: Path, where: str, prompts: list[Prompt], value: float
) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt_token_ids": p.token_ids} for p in prompts]
    for row, prompt in zip(rows, prompts, strict=True):
        row |= {} if prompt.response_ids is None else {"response_token_ids": prompt.response_ids}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = make_config(prompts=path, eval_prompts=0, target_layer_ids=(1, 3), max_steps=2)
    with pytest.raises(JetSpecError, match=CAUSES[where]) as raised:
        train(config, target=poison(where, value))
    assert "learning_rate" not in str(raised.value)


def test_requests_that_the_engine_fails_are_not_answers(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks the engine says whose request failed, and why."""
    from jetspec.engine import accept as accept_module
    from jetspec.head import head_for_target

    def fail(*_: object, **__: object) -> Any:
        raise JetSpecError("the target's logits are not finite")

    monkeypatch.setattr(accept_module, "process", fail)
    settings = CaptureSettings(target_layer_ids=(1,), temperature=1.0)
    with pytest.raises(JetSpecError, match="training prompt 1: the target's logits are not finite"):
        capture(target, WRITTEN[:1], tmp_path / "capture", settings)
    answers = EngineAnswers(target, AnswerStore(tmp_path / "a.jsonl"), 4, 1.0, 0, "tiny")
    with pytest.raises(JetSpecError, match=r"target: .*the target's logits are not finite"):
        answers([Ask((5, 6), "")])
    assert not AnswerStore(tmp_path / "a.jsonl").known
    head = head_for_target(target, num_layers=1, block_size=4, num_aux_layers=2, mask_token_id=270)
    with pytest.raises(JetSpecError, match="held-out prompt 1: the target's logits are not finite"):
        measure_acceptance(target, head, [[5, 6]], temperature=1.0)


@pytest.fixture
def make_step(target: Target, make_config: MakeConfig, tmp_path: Path) -> Callable[[str], GradientStep]:
    """Steps over a capture some of whose numbers are NaN, as an earlier version may have stored them."""
    from jetspec.train.run import initial_head

    def make(name: str) -> GradientStep:
        folder = tmp_path / name
        capture(target, GIVEN, folder, CaptureSettings(target_layer_ids=(1, 3)))
        [path] = folder.glob("*.safetensors")
        tensors = load_file(path)
        if name != "clean":
            half = target.hidden_size
            tensors[name][:, half if name == "aux_hidden_states" else 0] = float("nan")
        save_file(tensors, path)
        config = make_config(target_layer_ids=(1, 3))
        return GradientStep(target, initial_head(target, config), CapturedSequences(folder), config)

    return make


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("aux_hidden_states", "training sequence 1: the target's hidden states are not finite after layer 3"),
        ("hidden", "training sequence 1: the target's hidden states are not finite after the final norm"),
        ("clean", None),
    ],
)
def test_a_stored_capture_is_the_cause(make_step: Callable[[str], GradientStep], name: str, message: str) -> None:
    assert make_step(name).find_fault([0, 1]) == message


def test_logits_that_are_not_finite_are_the_cause(make_step: Callable[[str], GradientStep]) -> None:
    step = make_step("clean")
    step._full.weight = step._full.weight.clone()
    step._full.weight[7] = float("inf")
    assert step.find_fault([0, 1]) == "training sequence 1: the target's logits are not finite"


def test_the_trainer_tells_the_causes_apart(
    target: Target, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(learning_rate=1e38, warmup=0.0, eval_prompts=0)
    with pytest.raises(JetSpecError, match=r"learning_rate=1e\+38: training diverged at step \d; lower it"):
        train(config, target=target)
    monkeypatch.setattr(GradientStep, "find_fault", lambda *_: "training sequence 1: not finite")
    with pytest.raises(JetSpecError, match=r"^training sequence 1: not finite"):
        train(make_config("other", learning_rate=1e38, warmup=0.0, eval_prompts=0), target=target)
