"""The front door: shapes of what goes in and comes out."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from jetspec import LLM, SamplingParams, StructuredOutputsParams
from jetspec.engine import Allocation, Budget, NgramDrafter, head_drafter
from jetspec.errors import JetSpecError, RequestError
from jetspec.head import DraftHead, head_for_target
from jetspec.models.target import Target
from jetspec.outputs import RequestOutput
from tests.helpers.tiny import tiny_target, tiny_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=6)
ABC = tiny_tokenizer().encode("abc")


@pytest.fixture(scope="module")
def llm() -> LLM:
    target = tiny_target(text=True)
    head = head_for_target(target, num_layers=1, block_size=4, num_aux_layers=2, mask_token_id=271)
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


def test_arguments_reach_the_chat_template(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = llm.target.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", tokenizer.chat_template + "{% if brief %}(brief){% endif %}")
    talk, kwargs = [{"role": "user", "content": "hi"}], {"brief": True}
    [output] = llm.chat(talk, GREEDY, chat_template_kwargs=kwargs)
    assert output.prompt == "<|user|>hi<|end|><|assistant|>(brief)"
    assert llm.encode_prompts(["hi", talk], chat_template_kwargs=kwargs) == [output.prompt_token_ids] * 2
    pieces = [piece.text for piece in llm.stream_chat(talk, GREEDY, chat_template_kwargs=kwargs)]
    assert "".join(pieces) == output.outputs[0].text
    assert llm.chat(talk, GREEDY)[0].prompt == "<|user|>hi<|end|><|assistant|>"
    with pytest.raises(JetSpecError, match="does not use 'tokenize'"):
        llm.chat(talk, GREEDY, chat_template_kwargs={"tokenize": True})


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
    with pytest.raises(RequestError, match=r"prompt 1: .*explode raised RuntimeError\('boom'\)") as caught:
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
        outputs = LLM(tiny_target(text=True), None, num_blocks=64).generate(["abc"] * 2, params)
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


@pytest.mark.parametrize(
    "prompts",
    [
        [[1.5]],
        [["a"]],
        [1, "a"],
        [None],
        "\ud800",
        None,
        5,
        b"abc",
        [b"abc"],
        {"prompt": "abc"},
        [{"prompt": "abc"}],
        [True],
        [[1, True]],
        {1, 2},
        torch.tensor(3),
    ],
)
def test_prompts_that_are_none_are_refused(llm: LLM, prompts) -> None:
    with pytest.raises(JetSpecError):
        llm.generate(prompts, GREEDY)


def test_a_callback_that_cannot_be_called_is_refused(llm: LLM) -> None:
    with pytest.raises(JetSpecError, match="on_token=5"):
        llm.generate("a", GREEDY, on_token=5)


def test_params_and_conversations_are_checked(llm: LLM) -> None:
    with pytest.raises(JetSpecError, match="params"):
        llm.generate("a", {"temperature": 0})
    with pytest.raises(JetSpecError, match="conversation"):
        llm.chat([[]], GREEDY)


@pytest.mark.parametrize(
    "messages", ["hi", {"role": "user", "content": "hi"}, None, [5], ["hi"], [[{"content": "hi"}]]]
)
def test_what_is_no_conversation_is_refused(llm: LLM, messages: object) -> None:
    with pytest.raises(JetSpecError, match=r"messages: .*\[\{'role': 'user'"):
        llm.chat(messages, GREEDY)


class Ones(Budget):
    """Gives what it is told to."""

    def __init__(self, rows: list) -> None:
        self.result = rows

    def allocate(self, sequences) -> Allocation:
        return Allocation(sequences, self.result)


def small_head(target: Target) -> DraftHead:
    return head_for_target(target, num_layers=1, block_size=4, num_aux_layers=2, mask_token_id=271)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda target: {"tree_budget": 4.5}, "tree_budget=4.5"),
        (lambda target: {"tree_budget": True}, "tree_budget=True"),
        (lambda target: {"draft_method": "magic"}, "draft_method"),
        (lambda target: {"draft": small_head(target), "draft_method": "model"}, "draft_method"),
        (lambda target: {"draft": small_head(target), "draft_method": "ngram"}, "draft"),
        (lambda target: {"draft": small_head(target), "head_window": 0}, "head_window=0"),
        (lambda target: {"draft": small_head(target), "head_window": "5"}, "head_window='5'"),
        (lambda target: {"draft": target}, "draft_method"),
        (lambda target: {"draft": NgramDrafter(), "draft_method": "chain"}, "draft_method"),
        (lambda target: {"draft": NgramDrafter(), "head_window": 5}, "head_window"),
        (lambda target: {"draft": 3}, "draft=3"),
        (lambda target: {"dtype": "bfloat16"}, "dtype"),
        *[(lambda target, d=d: {"device": d}, "device") for d in ("meta", "nowhere", 5, None)],
        (lambda target: {"model": 3}, "model=3"),
        (lambda target: {"seed": "x"}, "seed='x'"),
        (lambda target: {"batch_invariant": 1}, "batch_invariant=1"),
        (lambda target: {"compile": "yes"}, "compile='yes'"),
        (lambda target: {"enable_prefix_caching": None}, "enable_prefix_caching=None"),
    ],
)
def test_arguments_that_cannot_be_honoured_are_refused(llm: LLM, make, message: str) -> None:
    with pytest.raises(JetSpecError, match=message):
        LLM(**{"model": llm.target, "num_blocks": 20, **make(llm.target)})


def test_loaded_models_draft(llm: LLM) -> None:
    small = LLM(llm.target, llm.target, draft_method="model", tree_budget=5, num_blocks=50)
    long = SamplingParams(temperature=0, max_tokens=21, ignore_eos=True)
    [output] = small.generate("abc", long)
    assert output.outputs == llm.generate("abc", long)[0].outputs
    assert output.metrics.acceptance_length > 1.5


@pytest.mark.parametrize("make", [lambda target: head_drafter(small_head(target)), lambda target: NgramDrafter()])
def test_a_drafter_belongs_to_one_engine(llm: LLM, make) -> None:
    drafter = make(llm.target)
    LLM(llm.target, drafter, num_blocks=20, tree_budget=4)
    with pytest.raises(JetSpecError, match=f"{type(drafter).__name__} belongs to another engine"):
        LLM(llm.target, drafter, num_blocks=20, tree_budget=4)


@pytest.mark.parametrize("rows", [[], [4, 4], [0], [-1], [2.5], [True]])
def test_budgets_that_give_no_rows_are_refused(llm: LLM, rows: list) -> None:
    own = LLM(llm.target, small_head(llm.target), tree_budget=Ones(rows), num_blocks=20)
    with pytest.raises(JetSpecError, match=r"tree_budget: Ones\.allocate gave"):
        own.generate("abc", GREEDY)
    assert own.engine.blocks.num_free == 20


def test_threads_take_turns(llm: LLM) -> None:
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=12) for i in range(8)]
    expected = [llm.generate(f"prompt {i}", p)[0].outputs for i, p in enumerate(params)]
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(llm.generate, f"prompt {i}", p) for i, p in enumerate(params)]
        assert [job.result(300)[0].outputs for job in jobs] == expected
    assert not llm.engine.has_work


def test_a_call_from_within_a_round_fails_alone(llm: LLM) -> None:
    def call_again(ids, scores):
        llm.generate("x", GREEDY)

    bad = SamplingParams(max_tokens=6, logits_processors=[call_again])
    with pytest.raises(RequestError, match="cannot be called from its own") as caught:
        llm.generate(["abc", "x"], [GREEDY, bad])
    assert caught.value.outputs[0].outputs == llm.generate("abc", GREEDY)[0].outputs
    assert not llm.engine.has_work


def all_entries(output: RequestOutput) -> list[dict]:
    answers = [entry for completion in output.outputs for entry in completion.logprobs or []]
    return answers + [entry for entry in output.prompt_logprobs or [] if entry is not None]


def test_log_probabilities_carry_the_text_of_their_tokens(llm: LLM) -> None:
    """Of chosen tokens, alternatives and prompts; where the answer is one of bytes, the text that is complete."""
    text = "日本 é!"
    form = StructuredOutputsParams(choice=[text])
    params = SamplingParams(max_tokens=30, structured_outputs=form, logprobs=-1, prompt_logprobs=2, n=2, seed=1)
    [output] = llm.generate("hi é", params)
    assert output.outputs[0].text == text
    letters = list(text)
    for completion in output.outputs:
        chosen = [entry[token] for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)]
        assert [c.decoded_token for c in chosen if c.decoded_token][: len(letters)] == letters
    ids = output.prompt_token_ids
    prompt = [entry[token].decoded_token for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
    assert prompt == ["i", " ", "", "é"]
    texts = {token: entry.decoded_token for token, entry in output.outputs[0].logprobs[0].items()}
    assert texts[ABC[0]] == "a"
    assert texts[llm.target.tokenizer.eos_token_id] == "<|end|>"
    assert all(isinstance(e.decoded_token, str) for entry in all_entries(output) for e in entry.values())
    assert not any("\ufffd" in e.decoded_token for entry in all_entries(output) for e in entry.values())


def test_pieces_and_the_outputs_of_failed_requests_carry_the_text_of_their_tokens(llm: LLM) -> None:
    def explode(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > 6:
            raise RuntimeError("boom")
        return scores

    params = SamplingParams(
        temperature=0, max_tokens=9, logprobs=1, prompt_logprobs=1, ignore_eos=True, logits_processors=[explode]
    )
    pieces = []
    with pytest.raises(RequestError) as caught:
        pieces.extend(llm.stream("abc", params))
    [output] = caught.value.outputs
    entries = all_entries(output)
    assert len(entries) == 2 + len(output.outputs[0].token_ids) > 2
    assert all(isinstance(e.decoded_token, str) for entry in entries for e in entry.values())
    assert [entry for piece in pieces for entry in piece.logprobs] == output.outputs[0].logprobs


def test_log_probabilities_without_a_tokenizer_have_no_text() -> None:
    llm = LLM(tiny_target(), None, num_blocks=20)
    [output] = llm.generate([1, 2, 3], SamplingParams(max_tokens=3, logprobs=1, prompt_logprobs=1))
    assert [e.decoded_token for entry in all_entries(output) for e in entry.values()].count(None) >= 5
