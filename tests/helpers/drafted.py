"""Trees that a published head drafts in the engine, and a check of their probabilities against the reference."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch

from jetspec.engine import Engine, Observer, head_drafter
from jetspec.engine.observer import RoundRecord
from jetspec.head import DraftHead
from jetspec.sampling import SamplingParams
from tests.helpers.published_heads import Context, Published, published_model, published_target

PROMPT = [5, 77, 30, 12, 99, 3, 41]


@dataclass
class Drafted:
    """A tree and the text before its root."""

    token_ids: list[int]
    record: RoundRecord


def generate(
    head: DraftHead | None, tokens: int, prompt: list[int] = PROMPT, budget: int = 20
) -> tuple[list[int], list[Drafted]]:
    """The greedy answer to a prompt, and its rounds."""
    rounds: list[Drafted] = []
    text: list[int] = []

    class Recorder(Observer):
        def round(self, record: RoundRecord) -> None:
            rounds.append(Drafted(text[:-1], record))

    drafter = None if head is None else head_drafter(head)
    target = published_target()
    engine = Engine(target, drafter, observer=Recorder(), num_blocks=32, kv_block_size=4, tree_budget=budget)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    sequence = engine.add("one", prompt, params)
    while engine.has_work:
        text = [*prompt, *sequence.output_ids]
        engine.step()
    return list(sequence.output_ids), [d for d in rounds if len(d.record.tokens) > 1]


@cache
def plain_answer(tokens: int) -> tuple[int, ...]:
    """The greedy answer to the prompt without a draft."""
    return tuple(generate(None, tokens)[0])


def published_rounds(head: DraftHead, tokens: int = 8) -> list[Drafted]:
    """The rounds of an answer, which is checked to be that of plain decoding."""
    answer, rounds = generate(head, tokens)
    assert tuple(answer) == plain_answer(tokens)
    return rounds


@torch.inference_mode()
def check_drafts(published: Published, rounds: list[Drafted], *, count: int = 2) -> None:
    """Every node of some rounds has the probability that the publisher's head gives it; the best one is among them."""
    model = published_model()
    assert len(rounds) >= 2
    for drafted in rounds[:count]:
        record = drafted.record
        states = model(torch.tensor([drafted.token_ids]), output_hidden_states=True).hidden_states
        paths: list[list[int]] = []
        expected: list[torch.Tensor] = []
        for row, (token, parent) in enumerate(zip(record.tokens, record.parents, strict=True)):
            paths.append([token] if parent < 0 else [*paths[parent], token])
            context = Context(
                tuple(s[0] for s in states),
                drafted.token_ids,
                paths[row],
                model.get_input_embeddings().weight,
                model.get_output_embeddings().weight,
            )
            if parent >= 0:
                step = record.log_probs[row] - record.log_probs[parent]
                assert step == pytest.approx(expected[parent][token].item(), abs=1e-4), (row, paths[row])
            expected.append(published.draft(published, context))
        # The best child of the root is the most probable token.
        assert record.tokens[1:] == [] or expected[0].argmax() in [
            token for token, parent in zip(record.tokens, record.parents, strict=True) if parent == 0
        ]
