"""Processing against transformers' warpers and against definitions written out with Python lists."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from jetspec.errors import JetSpecError
from jetspec.sampling import SamplingParams, process
from jetspec.sampling.filters import top_p

INF = float("inf")
V = 40


def logits_of(seed, width=V):
    return torch.randn(width, generator=torch.Generator().manual_seed(seed)) * 3


def kept(scores):
    return set((scores > -INF).nonzero().flatten().tolist())


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("changes", "warpers"),
    [
        ({"temperature": 0.6}, [TemperatureLogitsWarper(0.6)]),
        ({"top_k": 5}, [TopKLogitsWarper(5)]),
        ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
        ({"top_p": 1e-6}, [TopPLogitsWarper(1e-6)]),
        ({"min_p": 0.2}, [MinPLogitsWarper(0.2)]),
        (
            {"temperature": 1.7, "top_k": 9, "top_p": 0.7, "min_p": 0.15, "repetition_penalty": 1.3},
            [
                RepetitionPenaltyLogitsProcessor(1.3),
                TemperatureLogitsWarper(1.7),
                TopKLogitsWarper(9),
                TopPLogitsWarper(0.7),
                MinPLogitsWarper(0.15),
            ],
        ),
    ],
    ids=["temperature", "top_k", "top_p", "tiny top_p", "min_p", "all in order"],
)
def test_against_transformers(changes, warpers, seed):
    logits, prompt, output = logits_of(seed), [1, 5, 5, 30], [7, 1]
    expected = LogitsProcessorList(warpers)(torch.tensor([prompt + output]), logits.clone().unsqueeze(0))[0]
    torch.testing.assert_close(process(logits, SamplingParams(**changes), prompt, output), expected)


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 8.0])
def test_top_p_over_a_large_vocabulary(p, scale):
    """Flat and peaked: the search must widen as far as it has to, and no further changes the outcome."""
    scores = torch.randn(5000, generator=torch.Generator().manual_seed(1)) * scale
    order = sorted(range(5000), key=lambda token: (-scores[token].item(), token))
    probabilities = scores.double().softmax(0)[order].tolist()
    count, total = 0, 0.0
    while total < p - 1e-6:
        total += probabilities[count]
        count += 1
    assert kept(top_p(scores, p)) in [set(order[:n]) for n in (count, count + 1)]


def test_equal_tokens():
    scores = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0])
    assert kept(process(scores, SamplingParams(top_k=2), [], [])) == {1, 2, 3}
    assert kept(process(scores, SamplingParams(top_p=0.5), [], [])) == {1, 2}


@settings(max_examples=100)
@given(st.data())
def test_penalties_by_definition(data):
    token = st.integers(0, V - 1)
    prompt, output = data.draw(st.lists(token, max_size=10)), data.draw(st.lists(token, max_size=10))
    repetition = data.draw(st.sampled_from([1.0, 0.5, 1.3]))
    frequency, presence = data.draw(st.tuples(*[st.sampled_from([0.0, -1.5, 0.25])] * 2))
    logits = logits_of(data.draw(st.integers(0, 99)))
    expected = []
    for i, x in enumerate(logits.tolist()):
        if i in prompt or i in output:
            x = x / repetition if x > 0 else x * repetition
        expected.append(x - frequency * output.count(i) - presence * (i in output))
    params = SamplingParams(
        temperature=0, repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence
    )
    torch.testing.assert_close(process(logits, params, prompt, output), torch.tensor(expected))


def test_bias_comes_after_penalties():
    params = SamplingParams(temperature=0, repetition_penalty=2.0, logit_bias={3: 5.0, 1: -INF})
    scores = process(torch.full((6,), 4.0), params, [3], [])
    assert scores.tolist() == [4.0, -INF, 4.0, 7.0, 4.0, 4.0]


@settings(max_examples=100)
@given(st.data())
def test_bad_words_against_transformers(data):
    token = st.integers(0, 3)
    words = data.draw(st.lists(st.lists(token, min_size=1, max_size=3), min_size=1, max_size=4))
    output = data.draw(st.lists(token, max_size=6))
    logits = logits_of(0, 6)
    params = SamplingParams(temperature=0, bad_words=["named"])
    scores = process(logits, params, [9], output, bad_words=words)
    # A begin token that no word holds stands for the prompt: only the answer counts.
    reference = NoBadWordsLogitsProcessor(words, eos_token_id=99)
    expected = reference(torch.tensor([[5, *output]]), logits.clone().unsqueeze(0))[0]
    assert torch.equal(scores, expected)


def test_bad_words_do_not_reach_into_the_prompt():
    params = SamplingParams(temperature=0, bad_words=["named"])
    assert kept(process(torch.zeros(4), params, [1], [], bad_words=[[1, 2]])) == {0, 1, 2, 3}
    assert kept(process(torch.zeros(4), params, [3], [1], bad_words=[[1, 2]])) == {0, 1, 3}


def test_bad_words_without_their_ids_are_not_skipped():
    with pytest.raises(JetSpecError, match="encode_bad_words"):
        process(torch.zeros(4), SamplingParams(bad_words=["x"]), [], [])


@pytest.mark.parametrize(("generated", "expected"), [(0, {0, 3}), (1, {0, 3}), (2, {0, 1, 2, 3})])
def test_min_tokens_holds_back_eos_and_stop_tokens(generated, expected):
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[2])
    assert kept(process(torch.zeros(4), params, [3], [3] * generated, eos_token_ids={1})) == expected


def test_user_processors_see_the_true_history_and_run_before_temperature():
    seen = []

    def first(ids, scores):
        seen.append((ids.tolist(), scores.tolist()))
        scores[0, 1] = 100.0  # writes to what it was given, as many do
        return scores

    def second(ids, scores):
        return scores * 2

    logits = torch.tensor([1.0, 2.0, 3.0])
    params = SamplingParams(temperature=0.5, logit_bias={0: 1.0}, logits_processors=[first, second])
    assert process(logits, params, [7, 8], [9]).tolist() == [8.0, 400.0, 12.0]
    assert seen == [([[7, 8, 9]], [[2.0, 2.0, 3.0]])]
    assert logits.tolist() == [1.0, 2.0, 3.0]


def test_a_processor_that_writes_to_its_scores_leaves_the_logits_alone():
    logits = torch.tensor([1.0, 2.0])
    params = SamplingParams(logits_processors=[lambda ids, scores: scores.zero_()])
    assert process(logits, params, [], []).tolist() == [0.0, 0.0]
    assert logits.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("result", [None, torch.zeros(3), torch.zeros(1, 2)])
def test_user_processors_must_return_scores(result):
    params = SamplingParams(logits_processors=[lambda ids, scores: result])
    with pytest.raises(JetSpecError, match="logits_processors"):
        process(torch.zeros(3), params, [], [])


def test_pure_and_free_where_nothing_is_set():
    logits = logits_of(3)
    assert process(logits, SamplingParams(), [1], [2]) is logits
    assert process(logits, SamplingParams(temperature=0, top_k=2, top_p=0.1, min_p=0.9), [1], [2]) is logits
    before = logits.clone()
    params = SamplingParams(
        temperature=0.5,
        top_k=5,
        top_p=0.5,
        min_p=0.1,
        repetition_penalty=1.2,
        frequency_penalty=0.5,
        presence_penalty=0.5,
        logit_bias={1: 2.0},
        bad_words=["x"],
        min_tokens=3,
        logits_processors=[lambda ids, scores: scores.zero_()],
    )
    process(logits, params, [1], [2, 3], {4}, [[5]])
    assert torch.equal(logits, before)


def test_half_precision_logits_are_processed_in_float32():
    scores = process(logits_of(1).bfloat16(), SamplingParams(temperature=0.3), [], [])
    assert scores.dtype == torch.float32
    assert torch.equal(scores, logits_of(1).bfloat16().float() / 0.3)


def test_min_p_is_relative_to_the_best_token():
    scores = torch.tensor([0.0, math.log(0.5), math.log(0.5) - 1e-3, -INF])
    assert kept(process(scores, SamplingParams(min_p=0.5), [], [])) == {0, 1}
