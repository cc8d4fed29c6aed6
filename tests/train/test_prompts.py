"""From rows to prompts: rendered as in serving, one for every turn of the assistant."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from jetspec import LLM
from jetspec.errors import JetSpecError
from jetspec.models.target import Target
from jetspec.prompts import BadRows, Row
from jetspec.train.prompts import Answer, Ask, Prompt, answer_rows, split_held_out, turns, unique
from jetspec.train.render import Renderer

SYSTEM = {"role": "system", "content": "be short"}
TALK = [
    SYSTEM,
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "ho"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "no"},
]
#: A template that writes earlier answers otherwise than the target did, and takes an argument.
THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('/think')[-1] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is false %}(none){% endif %}{% endif %}"
)


@pytest.fixture
def thinking(target: Target) -> Target:
    other = copy.copy(target)
    other.tokenizer = copy.deepcopy(target.tokenizer)
    other.tokenizer.chat_template = THINKING
    return other


@pytest.fixture
def raw(target: Target) -> Target:
    other = copy.copy(target)
    other.tokenizer = copy.deepcopy(target.tokenizer)
    other.tokenizer.chat_template = None
    return other


def prompts_of(row: Row, renderer: Renderer, **options: Any) -> list[Prompt]:
    """Of a row whose turns are all given, or left open at the end."""
    bad = BadRows()
    [prompts] = answer_rows([row], lambda r: turns(r, renderer, **options), lambda _asks: pytest.fail("asked"), bad)
    bad.raise_if_any()
    return prompts


def encode(target: Target, text: str) -> tuple[int, ...]:
    return tuple(target.tokenizer.encode(text, add_special_tokens=False))


def served(target: Target, messages: list[dict]) -> tuple[int, ...]:
    return tuple(LLM(target, None).prepare_chat([messages])[0].prompt_token_ids)


def test_every_assistant_turn_is_an_example_as_served(target: Target) -> None:
    first, last = prompts_of(Row("w", TALK), Renderer(target))
    assert first == Prompt(served(target, TALK[:2]), encode(target, "ho<|end|>"))
    assert last == Prompt(served(target, TALK[:4]), encode(target, "no<|end|>"))
    assert prompts_of(Row("w", TALK[:4]), Renderer(target)) == [first, Prompt(last.token_ids)]
    assert prompts_of(Row("w", TALK[:4], "no"), Renderer(target)) == [first, last]
    assert prompts_of(Row("w", TALK[:4], [7]), Renderer(target))[1].response_ids == (7,)


def test_texts_and_token_ids(target: Target, raw: Target) -> None:
    chat = served(target, TALK[1:2])
    assert prompts_of(Row("w", "hi", "ho"), Renderer(target)) == [Prompt(chat, encode(target, "ho<|end|>"))]
    assert prompts_of(Row("w", "hi"), Renderer(target, chat=False)) == [Prompt(encode(target, "hi"))]
    assert prompts_of(Row("w", "hi", "ho"), Renderer(raw)) == [Prompt(encode(target, "hi"), encode(raw, "ho<|end|>"))]
    assert prompts_of(Row("w", [4, 5], [6]), Renderer(target)) == [Prompt((4, 5), (6,))]
    with pytest.raises(JetSpecError, match="w: messages: the target has no chat template"):
        prompts_of(Row("w", TALK), Renderer(raw))
    with pytest.raises(JetSpecError, match="chat: the target has no chat template"):
        Renderer(raw, chat=True)


def test_template_kwargs_reach_the_template(thinking: Target) -> None:
    off = Renderer(thinking, template_kwargs={"enable_thinking": False})
    [prompt] = prompts_of(Row("w", "hi"), off)
    assert prompt.token_ids == encode(thinking, "<|user|>hi<|end|>\n<|assistant|>(none)")
    with pytest.raises(JetSpecError, match=r"chat_template_kwargs: .* does not use 'thinking'"):
        Renderer(thinking, template_kwargs={"thinking": False})


def test_the_end_of_an_answer_is_the_one_of_the_template(thinking: Target) -> None:
    thinking.tokenizer.eos_token = "<|system|>"  # a tokenizer whose end of text is not its end of turn
    assert Renderer(thinking).answer("ho") == encode(thinking, "ho<|end|>")
    assert Renderer(thinking).answer("ho", finished=False) == encode(thinking, "ho")


def test_turns_are_written_behind_the_targets_own_answers(thinking: Target) -> None:
    said: list[Ask] = []

    def answerer(asks: list[Ask]) -> list[Answer | JetSpecError]:
        said.extend(asks)
        return [Answer("abc/thinkso", (1, 2, 3), True) for _ in asks]

    renderer, bad = Renderer(thinking), BadRows()
    row = Row("w", TALK)
    [prompts] = answer_rows([row], lambda r: turns(r, renderer, regenerate=True), answerer, bad)
    assert [p.response_ids for p in prompts] == [(1, 2, 3), None]
    again = [*TALK[:2], {"role": "assistant", "content": "abc/thinkso"}, TALK[3]]
    assert prompts[1].token_ids == served(thinking, again)
    assert "abc" not in thinking.tokenizer.decode(prompts[1].token_ids)  # the template drops it: not what was written
    assert [a.token_ids for a in said] == [prompts[0].token_ids]
    [prompts] = answer_rows([row], lambda r: turns(r, renderer, regenerate=True, ask_last=True), answerer, bad)
    assert [p.response_ids for p in prompts] == [(1, 2, 3)] * 2


def test_a_cut_answer_ends_its_conversation_and_a_failed_one_drops_it(target: Target) -> None:
    results: list[Answer | JetSpecError] = [Answer("ab", (1,), False), JetSpecError("no luck")]
    bad = BadRows()
    rows = [Row("first", TALK), Row("second", TALK)]
    found = answer_rows(rows, lambda r: turns(r, Renderer(target), regenerate=True), lambda _asks: results, bad)
    assert [len(prompts) for prompts in found] == [1, 0]
    assert bad.errors == ["second: no luck"]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("x" * 300, "3.. tokens, the target's context holds 254 with an answer"),
        ([99_999], "outside the target's vocabulary"),
        ("\ud800", "cannot be encoded"),
    ],
)
def test_rows_that_do_not_fit(target: Target, prompt: Any, message: str) -> None:
    with pytest.raises(JetSpecError, match="w: .*" + message):
        prompts_of(Row("w", prompt), Renderer(target))


def test_a_conversation_that_the_template_refuses(thinking: Target) -> None:
    thinking.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(JetSpecError, match="w: messages: the chat template refuses them: roles must alternate"):
        prompts_of(Row("w", TALK), Renderer(thinking))


def test_held_out_and_unique() -> None:
    items = list(range(30))
    training, held_out = split_held_out(items, held_out=4, max_prompts=None, seed=0)
    assert sorted(training + held_out) == items
    assert len(held_out) == 4
    assert split_held_out(items, held_out=4, max_prompts=5, seed=0) == (training[:5], held_out)
    assert split_held_out(items, held_out=4, max_prompts=None, seed=1)[1] != held_out
    with pytest.raises(JetSpecError, match="eval_prompts=30"):
        split_held_out(items, held_out=30, max_prompts=None, seed=0)
    assert unique("abcab", key=str.upper, seen="B") == ["a", "c"]
