"""Tokens that come out of trees follow the target's processed distribution."""

from __future__ import annotations

import math

import pytest
import torch

from jetspec.engine import Engine
from jetspec.models.target import Target
from jetspec.sampling import SamplingParams
from tests.helpers.goodness_of_fit import chi_square_p
from tests.helpers.tiny import tiny_llama
from tests.helpers.tiny_head import tiny_head

VOCAB_SIZE = 20
PROMPT = [3, 11, 3, 7]
MODEL = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 1}
TEMPERATURE, TOP_K, TOP_P = 1.6, 7, 0.92
REPETITION, FREQUENCY, PRESENCE = 1.25, 0.7, -0.9  # so that tokens repeat, and all three matter then
LENGTH = 3


def next_distribution(logits: list[float], output: list[int]) -> list[float]:
    """The definition, in plain numbers: penalties, temperature, top-k, top-p."""
    scores = list(logits)
    for token in set(PROMPT) | set(output):
        scores[token] *= 1 / REPETITION if scores[token] > 0 else REPETITION
    for token in set(output):
        scores[token] -= FREQUENCY * output.count(token) + PRESENCE
    weights = {token: math.exp(score / TEMPERATURE) for token, score in enumerate(scores)}
    best = sorted(weights, key=lambda token: (-weights[token], token))[:TOP_K]
    kept: list[int] = []
    total = sum(weights[token] for token in best)
    for token in best:
        if sum(weights[t] for t in kept) >= TOP_P * total:
            break
        kept.append(token)
    rest = sum(weights[token] for token in kept)
    return [weights[token] / rest if token in kept else 0.0 for token in range(VOCAB_SIZE)]


def joint_distribution() -> torch.Tensor:
    """Exact probabilities [V, V, V] of the answer's tokens, from transformers' logits."""
    model = tiny_llama(**MODEL)
    joint = torch.zeros([VOCAB_SIZE] * LENGTH, dtype=torch.float64)
    reached: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        contexts = list(reached)
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPT, *context] for context in contexts])).logits[:, -1].tolist()
        following: dict[tuple[int, ...], float] = {}
        for context, row in zip(contexts, logits, strict=True):
            for token, p in enumerate(next_distribution(row, list(context))):
                if p > 0:
                    following[(*context, token)] = reached[context] * p
        reached = following
    for tokens, p in reached.items():
        joint[tokens] = p
    return joint


def pooled(counts: torch.Tensor, probabilities: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both with the cells that expect fewer than five samples as one."""
    rare = (probabilities > 0) & (probabilities * counts.sum() < 5)
    return tuple(torch.cat([x[~rare], x[rare].sum().view(1)]) for x in (counts, probabilities))


@pytest.mark.slow
@pytest.mark.parametrize("samples", [2_000, 20_000])
def test_joint_distribution_of_tokens_from_trees(samples: int) -> None:
    expected = joint_distribution()
    assert (expected > 0).sum() > 100
    target = Target.from_model(tiny_llama(**MODEL))
    head = tiny_head(
        hidden_size=48,
        num_hidden_layers=1,
        vocab_size=VOCAB_SIZE,
        mask_token_id=VOCAB_SIZE - 1,
        num_target_layers=1,
        target_layer_ids=(0,),
        block_size=2,
    )
    engine = Engine(target, head, tree_budget=17, num_blocks=600, kv_block_size=4, max_num_seqs=64)
    counts = torch.zeros_like(expected)
    drafted = 0
    for seed in range(samples):
        params = SamplingParams(
            temperature=TEMPERATURE,
            top_k=TOP_K,
            top_p=TOP_P,
            repetition_penalty=REPETITION,
            frequency_penalty=FREQUENCY,
            presence_penalty=PRESENCE,
            seed=seed,
            max_tokens=LENGTH,
            ignore_eos=True,
        )
        engine.add(str(seed), PROMPT, params)
    while engine.has_work:
        for output in engine.step():
            if output.finished:
                counts[tuple(output.sequence.output_ids)] += 1
                # One round for the last two tokens: the last one was chosen at a draft's row.
                drafted += output.sequence.metrics.rounds == 1
    assert counts.sum() == samples
    assert samples / 2 < drafted < samples
    assert counts[expected == 0].sum() == 0
    assert chi_square_p(*pooled(counts.flatten(), expected.flatten())) > 1e-3
