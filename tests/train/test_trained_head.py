"""A trained head drafts what its target says, and changes none of it."""

from __future__ import annotations

import pytest

from jetspec import LLM, SamplingParams
from jetspec.head import DraftHead, load_head, new_head
from jetspec.models.target import Target
from tests.helpers.training import Trained

#: The head they share takes a training run.
pytestmark = pytest.mark.slow

TEXTS = ["add 11 to 12 #1", "a", "add 50 to 61 #77 and tell me", "add 9", "#3 add 20 to 97 #4"]


@pytest.fixture(scope="module")
def head(trained: Trained) -> DraftHead:
    return load_head(trained.config.folder)


@pytest.fixture(scope="module")
def plain(target: Target) -> LLM:
    return LLM(target, None, num_blocks=200)


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_equals_plain_decoding(target: Target, head: DraftHead, plain: LLM, batch: int, temperature: float) -> None:
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=(30, 7, 24, 1, 40)[i], ignore_eos=True)
        for i in range(batch)
    ]
    alone = [plain.generate(text, p)[0].outputs for text, p in zip(TEXTS, params)]
    together = LLM(target, head, tree_budget=12, num_blocks=200).generate(TEXTS[:batch], params)
    assert [o.outputs for o in together] == alone


def test_accepts_more_than_an_untrained_head(target: Target, head: DraftHead) -> None:
    untrained = new_head(head.config)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)

    def accepted(drafting: DraftHead) -> float:
        outputs = LLM(target, drafting, tree_budget=12, num_blocks=200).generate(TEXTS, params)
        return sum(o.metrics.decoded_tokens for o in outputs) / sum(o.metrics.rounds for o in outputs)

    assert accepted(head) > 1.1 * accepted(untrained)
