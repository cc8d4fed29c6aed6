"""A head for one tiny model of each kind of layers: training raises what is accepted, and changes no token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from jetspec import LLM, SamplingParams
from jetspec.head import DraftHead, load_head, new_head
from jetspec.models.target import Target
from jetspec.train import TrainConfig, train
from tests.helpers.layers import FAMILIES, FAMILY_MODELS
from tests.helpers.tiny import TEXT_VOCAB_SIZE, tiny_tokenizer
from tests.helpers.training import SETTINGS


def calm(model: PreTrainedModel) -> None:
    """Let the layers add little to the embedding, so that the text has regularities that a small head can learn."""
    for name, parameter in model.named_parameters():
        if ".layers." in name and parameter.dim() >= 2:
            parameter.mul_(0.15)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_head_accepts_more_and_changes_nothing(family: str, prompts_file: Path, tmp_path: Path) -> None:
    settings = {"vocab_size_per_layer_input": TEXT_VOCAB_SIZE} if family == "gemma4_text" else {}
    model = FAMILY_MODELS[family](seed=3, vocab_size=TEXT_VOCAB_SIZE, **settings)
    if family != "gemma4_text":  # its norms and tied embedding make up for it
        calm(model)
    target = Target.from_model(model, tiny_tokenizer(), name=family)
    size = {"max_prompts": 120, "eval_prompts": 4, "max_tokens": 24, "shard_sequences": 64, "target_layer_ids": (1, 2)}
    step = {"max_steps": 150, "eval_every": 150, "blocks_per_step": 64, "num_layers": 1, "init": "random"}
    config = TrainConfig(**{**SETTINGS, **size, **step, "prompts": prompts_file, "output": tmp_path / "head"})
    train(config, target=target)
    head = load_head(config.folder)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    questions = [json.loads(line)["question"] for line in prompts_file.read_text().splitlines()[20:28]]
    chats = [[{"role": "user", "content": question}] for question in questions]
    plain = [o.outputs for o in LLM(target, None, num_blocks=200).chat(chats, params)]

    def accepted(drafting: DraftHead) -> float:
        outputs = LLM(target, drafting, tree_budget=12, num_blocks=200).chat(chats, params)
        assert [o.outputs for o in outputs] == plain
        return sum(o.metrics.decoded_tokens for o in outputs) / sum(o.metrics.rounds for o in outputs)

    assert accepted(head) > 1.1 * accepted(new_head(head.config))
