"""Samples follow the processed distribution exactly, and depend on seed and position alone."""

import pytest
import torch

from jetspec.errors import JetSpecError
from jetspec.sampling import SamplingParams, process, sample
from jetspec.sampling.noise import gumbel_of, uniform
from tests.helpers.goodness_of_fit import chi_square_p

INF = float("inf")
LOGITS = torch.tensor([1.0, 0.5, 2.0, -1.0, 0.0, 1.5, -3.0, 0.25, -0.5, 1.0])
DRAWS = 20_000


def by_hand(params, prompt, output):
    """The distribution as a list of probabilities, filter by filter, in plain Python."""
    scores = LOGITS.double().tolist()
    for i in range(len(scores)):
        if i in prompt + output:
            scores[i] = (
                scores[i] / params.repetition_penalty if scores[i] > 0 else scores[i] * params.repetition_penalty
            )
        scores[i] -= params.frequency_penalty * output.count(i) + params.presence_penalty * (i in output)
        scores[i] /= params.temperature
    weights = torch.tensor(scores, dtype=torch.float64).softmax(0).tolist()
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1:
        total, nucleus = sum(weights[i] for i in order), []
        for i in order:
            nucleus.append(i)
            if sum(weights[j] for j in nucleus) >= params.top_p * total:
                break
        order = nucleus
    order = [i for i in order if weights[i] >= params.min_p * weights[order[0]]]
    result = [weights[i] if i in order else 0.0 for i in range(len(weights))]
    return torch.tensor(result, dtype=torch.float64) / sum(result)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"temperature": 0.5}, marks=pytest.mark.slow),
        pytest.param({"temperature": 2.0, "top_k": 4}, marks=pytest.mark.slow),
        pytest.param({"top_p": 0.75}, marks=pytest.mark.slow),
        pytest.param({"min_p": 0.3}, marks=pytest.mark.slow),
        {
            "temperature": 1.3,
            "top_k": 7,
            "top_p": 0.9,
            "min_p": 0.1,
            "repetition_penalty": 1.4,
            "frequency_penalty": 0.3,
            "presence_penalty": -0.4,
        },
    ],
    ids=["plain", "temperature", "top_k", "top_p", "min_p", "everything"],
)
def test_goodness_of_fit(changes):
    """Fault 9."""
    params, prompt, output = SamplingParams(**changes), [2, 6, 2], [5, 0, 0]
    scores = process(LOGITS, params, prompt, output)
    tokens = torch.tensor([sample(scores, params, 11, position) for position in range(DRAWS)])
    counts = torch.bincount(tokens, minlength=len(LOGITS))
    expected = by_hand(params, prompt, output)
    assert chi_square_p(counts, expected) > 1e-3
    # The test can tell: two percent in the wrong place are found.
    wrong = expected.clone()
    wrong[expected.argmax()] -= 0.02
    wrong[torch.where(expected > 0, expected, 2.0).argmin()] += 0.02
    assert chi_square_p(counts, wrong) < 1e-6


@pytest.mark.slow
def test_fits_over_seeds_as_well():
    params = SamplingParams()
    tokens = torch.tensor([sample(LOGITS, params, seed, 3) for seed in range(DRAWS)])
    assert chi_square_p(torch.bincount(tokens, minlength=len(LOGITS)), LOGITS.double().softmax(0)) > 1e-3


def test_sample_is_the_argmax_of_scores_plus_noise():
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    for changes in ({}, {"top_k": 50}, {"top_p": 0.5}):
        params = SamplingParams(**changes)
        scores = process(logits, params, [], [])
        for position in range(50):
            noise = gumbel_of(uniform(5, position, torch.arange(3000)))
            assert sample(scores, params, 5, position) == int((scores.double() + noise).argmax())


def test_filters_do_not_move_the_noise():
    """A token that wins unfiltered wins filtered too, where it survives."""
    filtered = SamplingParams(top_k=5)
    scores = process(LOGITS, filtered, [], [])
    survivors = set((scores > -INF).nonzero().flatten().tolist())
    for position in range(300):
        token = sample(LOGITS, SamplingParams(), 1, position)
        if token in survivors:
            assert sample(scores, filtered, 1, position) == token


def test_near_ties_are_decided_by_the_portable_noise():
    noise = gumbel_of(uniform(1, 1, torch.arange(6)))
    level = (10 - noise).float()  # all scores within float32's rounding of each other
    assert (level.double() + noise - 10).abs().max() < 1e-6
    assert sample(level, SamplingParams(), 1, 1) == int((level.double() + noise).argmax())


def test_greedy_takes_the_lowest_id_of_equal_tokens():
    params = SamplingParams(temperature=0)
    assert sample(torch.tensor([0.0, 2.0, 1.0, 2.0]), params, 0, 0) == 1
    assert sample(torch.tensor([0.0, 2.0, 1.0, 2.0]), params, 9, 9) == 1


def test_another_seed_gives_other_tokens():
    """Fault 11's ground: what one request draws says nothing about what another does."""
    params, flat = SamplingParams(), torch.zeros(1000)
    texts = [[sample(flat, params, seed, p) for p in range(20)] for seed in range(5)]
    assert len({tuple(text) for text in texts}) == 5
    assert max(sum(a == b for a, b in zip(texts[0], text, strict=True)) for text in texts[1:]) <= 2
    assert texts[3] == [sample(flat, params, 3, p) for p in range(20)]


@pytest.mark.parametrize("changes", [{"temperature": 0}, {}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}])
@pytest.mark.parametrize("value", [-INF, float("nan")])
def test_no_token_left_is_an_error(changes, value):
    params = SamplingParams(**changes)
    with pytest.raises(JetSpecError, match="every token is banned"):
        sample(process(torch.full((4,), value), params, [], []), params, 0, 0)


@pytest.mark.parametrize("changes", [{"temperature": 0}, {}, {"top_k": 2}])
def test_a_banned_token_is_never_chosen(changes):
    params = SamplingParams(logit_bias={0: -INF, 2: -INF}, **changes)
    scores = process(torch.tensor([9.0, 0.0, 9.0]), params, [], [])
    assert {sample(scores, params, 0, position) for position in range(100)} == {1}
