"""A trained head drafts what its target says, and changes none of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from jetspec import LLM, SamplingParams
from jetspec.head import DraftHead, load_head, new_head
from jetspec.models.target import Target
from jetspec.train import TrainConfig, train

TEXTS = ["add 11 to 12 #1", "a", "add 50 to 61 #77 and tell me", "add 9", "#3 add 20 to 97 #4"]


@pytest.fixture(scope="module")
def trained(target: Target, prompts_file: Path, tmp_path_factory: pytest.TempPathFactory) -> DraftHead:
    output = tmp_path_factory.mktemp("trained")
    config = TrainConfig(
        target="tiny",
        prompts=prompts_file,
        output=output,
        eval_prompts=4,
        max_tokens=24,
        num_layers=2,
        block_size=4,
        num_aux_layers=2,
        max_steps=60,
        blocks_per_step=64,
        eval_every=60,
        learning_rate=3e-3,
        dtype="float32",
    )
    train(config, target=target)
    return load_head(output)


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_equals_plain_decoding(target: Target, trained: DraftHead, batch: int, temperature: float) -> None:
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=(30, 7, 24, 1, 40)[i], ignore_eos=True)
        for i in range(batch)
    ]
    plain = LLM(target, None, num_blocks=200)
    alone = [plain.generate(text, p)[0].outputs for text, p in zip(TEXTS, params)]
    together = LLM(target, trained, tree_budget=12, num_blocks=200).generate(TEXTS[:batch], params)
    assert [o.outputs for o in together] == alone


def test_accepts_more_than_an_untrained_head(target: Target, trained: DraftHead) -> None:
    untrained = new_head(trained.config)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)

    def accepted(head: DraftHead) -> float:
        outputs = LLM(target, head, tree_budget=12, num_blocks=200).generate(TEXTS, params)
        return sum(o.metrics.decoded_tokens for o in outputs) / sum(o.metrics.rounds for o in outputs)

    assert accepted(trained) > 1.1 * accepted(untrained)
