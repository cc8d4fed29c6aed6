"""What requests ask beyond tokens: log probabilities, stop strings, processors; and that none harms another."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

import jetspec.engine.requests as requests_module
from jetspec.engine import Engine, Sequence
from jetspec.errors import JetSpecError
from jetspec.models.target import Target
from jetspec.sampling import SamplingParams, StructuredOutputsParams, top_logprobs
from tests.helpers.decoding import decode
from tests.helpers.drafters import OracleDrafter
from tests.helpers.engine import finish, known_answers, make_prompts, make_target, reference_model, references, run
from tests.helpers.tiny import TEXT_VOCAB_SIZE, VOCAB_SIZE, tiny_target


def oracle_engine(prompts: list[list[int]], length: int = 20, **settings) -> Engine:
    greedy = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)] * len(prompts)
    drafter = OracleDrafter(known_answers("llama", prompts, greedy), VOCAB_SIZE, hit=0.9)
    return Engine(make_target(), drafter, tree_budget=20, num_blocks=200, **settings)


def test_a_failing_processor_harms_only_its_own_request() -> None:
    def explode(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > 8:
            raise RuntimeError("boom")
        return scores

    prompts = make_prompts(3)
    plain = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    params = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logits_processors=[explode]), plain, plain]
    engine = oracle_engine(prompts)
    failed, *others = finish(engine, prompts, params)
    truth = references("llama", prompts, [plain] * 3)
    assert failed.finish_reason == "error"
    assert "boom" in str(failed.error)
    assert failed.output_ids == truth[0][0][: 9 - len(prompts[0])]
    assert [(s.output_ids, s.finish_reason) for s in others] == truth[1:]
    assert engine.blocks.num_free == 200


def test_all_tokens_banned_is_an_error_of_that_request() -> None:
    prompts = make_prompts(2)
    ban = SamplingParams(
        temperature=1.0, seed=1, max_tokens=5, logit_bias={t: float("-inf") for t in range(VOCAB_SIZE)}
    )
    sequences = finish(
        oracle_engine(prompts), prompts, [ban, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)]
    )
    assert [s.finish_reason for s in sequences] == ["error", "length"]
    assert "banned" in str(sequences[0].error)


@pytest.mark.parametrize("max_num_batched_tokens", [7, 200])
def test_logprobs_equal_those_of_a_plain_forward(max_num_batched_tokens: int) -> None:
    prompts = make_prompts(4)
    params = [
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=i, prompt_logprobs=2) for i in range(4)
    ]
    engine = oracle_engine(prompts, max_num_batched_tokens=max_num_batched_tokens)
    model = reference_model("llama")
    for s, p in zip(finish(engine, prompts, params), params, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([s.token_ids]), use_cache=False).logits[0].float()
        n = len(s.prompt_ids)
        expected = top_logprobs(logits[n - 1 : -1], s.output_ids, p.logprobs)
        assert_same(s.logprobs, expected)
        assert s.prompt_logprobs[0] is None
        assert len(s.prompt_logprobs) == n
        if n > 1:
            assert_same(s.prompt_logprobs[1:], top_logprobs(logits[: n - 1], s.prompt_ids[1:], 2))


def assert_same(got: list, expected: list) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert list(a) == list(b)
        for token in a:
            assert a[token].rank == b[token].rank
            assert a[token].logprob == pytest.approx(b[token].logprob, abs=1e-4)


PROCESSED = {
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.8, "presence_penalty": 0.5},
    "bias": {"logit_bias": {3: 6.0, 90: -100.0}},
    "min tokens": {"min_tokens": 15, "stop_token_ids": list(range(64))},
    "filters": {"temperature": 1.4, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
    "processor": {"logits_processors": [lambda ids, scores: scores.roll(int(ids.shape[1]) % 3, dims=1)]},
}


@pytest.mark.parametrize("name", PROCESSED)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_processors_work_along_the_accepted_path(name: str, temperature: float) -> None:
    prompts = make_prompts(3)
    settings = {"temperature": temperature, **PROCESSED[name]}
    params = [SamplingParams(max_tokens=18, seed=i, **settings) for i in range(3)]
    target = make_target()
    model = reference_model("llama")
    truth = [decode(model, ids, p, target.eos_token_ids, p.seed) for ids, p in zip(prompts, params, strict=True)]
    known = {tuple(ids): output for ids, (output, _) in zip(prompts, truth, strict=True)}
    engine = Engine(target, OracleDrafter(known, VOCAB_SIZE, hit=0.9), tree_budget=20, num_blocks=200)
    assert run(engine, prompts, params) == truth


@cache
def text_target() -> Target:
    return tiny_target(text=True, num_hidden_layers=2)


def text_run(params: SamplingParams, prompt: list[int], truth: list[int] | None = None) -> Sequence:
    target = text_target()
    drafter = None if truth is None else OracleDrafter({tuple(prompt): truth}, TEXT_VOCAB_SIZE, hit=1.0)
    (sequence,) = finish(Engine(target, drafter, tree_budget=20, num_blocks=64), [prompt], [params])
    return sequence


def test_stop_strings_end_a_request_inside_an_accepted_path() -> None:
    prompt = list(b"hello")
    printable = dict.fromkeys(range(65, 91), 40.0)
    base = {"temperature": 0, "max_tokens": 16, "logit_bias": printable, "ignore_eos": True}
    long = text_run(SamplingParams(**base), prompt)
    assert len(long.text) == 16
    for cut in (2, 3, 5, 8, 11):
        stop = long.text[cut : cut + 3]
        expected = long.text[: long.text.index(stop)]
        for truth in (None, long.output_ids):
            got = text_run(SamplingParams(**base, stop=[stop, "never"]), prompt, truth)
            assert (got.text, got.finish_reason, got.stop_reason) == (expected, "stop", stop)
            assert got.output_ids == long.output_ids[: len(expected) + 3]
            kept = text_run(SamplingParams(**base, stop=stop, include_stop_str_in_output=True), prompt, truth)
            assert kept.text == expected + stop


def test_text_of_a_request_is_the_text_of_its_tokens() -> None:
    for seed in range(3):
        got = text_run(SamplingParams(temperature=1.5, seed=seed, max_tokens=30, ignore_eos=True), list(b"abc"))
        assert got.text == text_target().tokenizer.decode(got.output_ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "prompt is empty"),
        ([1, 4000], {}, "4000"),
        ([1] * 256, {}, "context"),
        ([1], {"max_tokens": 255}, "K/V cache"),
        ([1], {"stop": "x"}, "tokenizer"),
        ([1], {"stop_token_ids": [999]}, "stop_token_ids"),
    ],
)
def test_bad_requests_are_refused(prompt: list[int], params: dict, message: str) -> None:
    engine = Engine(make_target(), num_blocks=8, kv_block_size=4)
    with pytest.raises(JetSpecError, match=message):
        engine.add("a", prompt, SamplingParams(**params))
    assert not engine.has_work
    assert engine.blocks.num_free == 8


def test_request_ids_are_unique() -> None:
    engine = Engine(make_target(), num_blocks=8)
    engine.add("a", [1], SamplingParams())
    with pytest.raises(JetSpecError, match="request_id"):
        engine.add("a", [1], SamplingParams())


@pytest.mark.parametrize("ids", [torch.tensor([3, 5]), np.array([3, 5]), [np.int64(3), 5], (3, 5), range(3, 7, 2)])
def test_ids_are_taken_in_any_list_of_integers(ids) -> None:
    engine = Engine(make_target(), num_blocks=20)
    plain = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    [sequence] = finish(engine, [ids], [plain])
    assert sequence.prompt_ids == [3, 5]
    assert sequence.output_ids == references("llama", [[3, 5]], [plain])[0][0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *[
            ({"prompt_ids": ids}, "prompt: must be a list of token ids")
            for ids in (None, 5, "ab", {1: 2}, [1.0], [True])
        ],
        ({"prompt_ids": torch.tensor(3)}, "prompt: must be a list of token ids"),
        *[({"params": params}, "params: must be SamplingParams") for params in (None, {"n": 1}, SamplingParams)],
        *[({"request_id": name}, "request_id=.*: must be text") for name in (None, 5, [])],
        ({"params": SamplingParams(n=2)}, "n=2: the engine gives one answer a request"),
    ],
)
def test_what_is_no_request_is_refused(changes: dict, message: str) -> None:
    engine = Engine(make_target(), num_blocks=20)
    request = {"request_id": "a", "prompt_ids": [1], "params": SamplingParams(), **changes}
    with pytest.raises(JetSpecError, match=message):
        engine.add(**request)
    assert not engine.has_work


def test_a_grammar_is_made_once_for_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(requests_module, "new_grammar", lambda *args: made.append(args))
    engine = Engine(tiny_target(text=True), num_blocks=20)
    engine.add("a", [1], SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"])))
    assert len(made) == 1


@pytest.mark.parametrize("target", [None, 5, "smollm2-135m"])
def test_an_engine_needs_a_loaded_target(target: object) -> None:
    with pytest.raises(JetSpecError, match=r"target=.*: must be a Target"):
        Engine(target)


@pytest.mark.parametrize("sizes", [{"num_blocks": 10**15}, {"kv_block_size": 10**12}, {"kv_block_size": 10**30}])
def test_a_cache_that_no_memory_holds_is_refused(sizes: dict) -> None:
    with pytest.raises(JetSpecError, match=r"num_blocks=.*, kv_block_size=.*GiB cannot be allocated"):
        Engine(make_target(), **sizes)
