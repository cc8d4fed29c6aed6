"""The front door: shapes of what goes in and comes out."""

from __future__ import annotations

import pytest
import torch

from jetspec import LLM, SamplingParams
from jetspec.errors import JetSpecError, RequestError
from jetspec.head import DraftHead
from tests.tiny import tiny_target, tiny_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=6)
ABC = tiny_tokenizer().encode("abc")


@pytest.fixture(scope="module")
def llm() -> LLM:
    target = tiny_target(text=True)
    head = DraftHead.from_target(target, num_layers=1, block_size=4, num_taps=2, mask_token_id=271)
    return LLM(target, head, tree_budget=6, num_blocks=200)


def test_prompts_may_be_texts_or_ids_one_or_many(llm: LLM) -> None:
    one = llm.generate("abc", GREEDY)
    assert one[0].prompt == "abc"
    assert one[0].prompt_token_ids == ABC
    assert [o.outputs[0].token_ids for o in llm.generate(ABC, GREEDY)] == [one[0].outputs[0].token_ids]
    many = llm.generate(["x", "abc", ABC], [SamplingParams(temperature=0, max_tokens=2), GREEDY, GREEDY])
    assert next(len(o.outputs[0].token_ids) for o in many) == 2
    assert many[1].outputs == many[2].outputs == one[0].outputs


def test_chat_takes_one_conversation_or_a_list(llm: LLM) -> None:
    talk = [{"role": "user", "content": "hi"}]
    one, two = llm.chat(talk, GREEDY), llm.chat([talk, talk], GREEDY)
    assert one[0].prompt == "<|user|>hi<|end|><|assistant|>"
    assert [o.outputs for o in two] == [one[0].outputs] * 2


def test_streaming_gives_every_token_and_all_text(llm: LLM) -> None:
    seen: dict[int, tuple[list[int], str]] = {}

    def collect(index: int, ids: list[int], text: str) -> None:
        before = seen.get(index, ([], ""))
        seen[index] = (before[0] + ids, before[1] + text)

    outputs = llm.generate(["one", "three"], SamplingParams(temperature=1.2, seed=3, max_tokens=30), on_token=collect)
    assert seen == {i: (o.outputs[0].token_ids, o.outputs[0].text) for i, o in enumerate(outputs)}


def test_n_answers_start_with_the_single_one(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=9, max_tokens=12)
    [single] = llm.generate("abc", params)
    [three] = llm.generate("abc", SamplingParams(temperature=1.0, seed=9, max_tokens=12, n=3))
    assert [c.index for c in three.outputs] == [0, 1, 2]
    assert three.outputs[0] == single.outputs[0]
    assert len({tuple(c.token_ids) for c in three.outputs}) == 3


def test_a_refused_prompt_is_named_and_nothing_runs(llm: LLM) -> None:
    with pytest.raises(JetSpecError, match="prompt 1: prompt is empty"):
        llm.generate([[1, 2], []], GREEDY)
    assert not llm.engine.has_work


def test_a_failed_request_loses_nothing_of_the_others(llm: LLM) -> None:
    def explode(ids, scores):
        raise RuntimeError("boom")

    bad = SamplingParams(temperature=0, max_tokens=6, logits_processors=[explode])
    with pytest.raises(RequestError, match="prompt 1: boom") as caught:
        llm.generate(["abc", "x"], [GREEDY, bad])
    assert caught.value.outputs[0].outputs == llm.generate("abc", GREEDY)[0].outputs
    assert caught.value.outputs[1].outputs[0].finish_reason == "error"


def test_an_interrupt_leaves_no_request_behind(llm: LLM) -> None:
    free = llm.engine.blocks.num_free

    def interrupt(index: int, ids: list[int], text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc", "x"], GREEDY, on_token=interrupt)
    assert not llm.engine.has_work
    assert llm.engine.blocks.num_free == free


def test_params_must_match_the_prompts(llm: LLM) -> None:
    with pytest.raises(JetSpecError, match="params: 1 given for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])


def test_unseeded_requests_differ_but_a_run_repeats() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=10)

    def answers() -> list[list[int]]:
        outputs = LLM(tiny_target(text=True), num_blocks=64).generate(["abc"] * 2, params)
        return [o.outputs[0].token_ids for o in outputs]

    first = answers()
    assert first[0] != first[1]
    assert first == answers()


@pytest.mark.parametrize("result", [lambda s: None, lambda s: s[:, :3], lambda s: s * float("nan")])
def test_a_lone_request_that_fails_is_reported(llm: LLM, result) -> None:
    bad = SamplingParams(temperature=1, max_tokens=6, logits_processors=[lambda ids, scores: result(scores)])
    for prompts in ("abc", ["abc", "x"]):
        with pytest.raises(RequestError, match="prompt 0"):
            llm.generate(prompts, bad)
    assert not llm.engine.has_work


def test_ids_may_come_in_tensors_and_arrays(llm: LLM) -> None:
    expected = llm.generate(ABC, GREEDY)[0]
    ids = torch.tensor(ABC)
    for prompts in (ids, ids.numpy(), list(ids.numpy()), [ids], [ids.numpy()]):
        [output] = llm.generate(prompts, GREEDY)
        assert output.outputs == expected.outputs
        assert all(type(token) is int for token in output.prompt_token_ids)


@pytest.mark.parametrize("prompts", [[[1.5]], [["a"]], [1, "a"], [None], "\ud800"])
def test_prompts_that_are_none_are_refused(llm: LLM, prompts) -> None:
    with pytest.raises(JetSpecError):
        llm.generate(prompts, GREEDY)


def test_params_and_conversations_are_checked(llm: LLM) -> None:
    with pytest.raises(JetSpecError, match="params"):
        llm.generate("a", {"temperature": 0})
    with pytest.raises(JetSpecError, match="conversation"):
        llm.chat([[]], GREEDY)
    with pytest.raises(JetSpecError, match="tree_budget"):
        LLM(llm.target, tree_budget=4.5)
    with pytest.raises(JetSpecError, match="draft_method"):
        LLM(llm.target, draft_method="magic")
