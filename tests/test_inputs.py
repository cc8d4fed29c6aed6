"""Arguments of chat templates: what a template does not use is refused, with the name that was meant."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from jetspec import LLM
from jetspec.errors import JetSpecError
from jetspec.inputs import checked_chat_template_kwargs
from tests.helpers.tiny import tiny_target, tiny_tokenizer

TALK = [{"role": "user", "content": "hi"}]
#: Every way in which templates read their arguments.
TEMPLATE = (
    "{%- set rounds = rounds | default(2) -%}"
    "{% if tone is not defined %}{% set tone = 'plain' %}{% endif %}"
    "{% macro line(text) %}{{ text }}{{ suffix }}{% endmacro %}"
    "{% if enable_thinking is defined and enable_thinking is false %}(brief){% endif %}"
    "{% set ns = namespace(last=none) %}"
    "{% for message in messages %}{{ bos_token }}{% generation %}{{ line(message.content) }}{%- endgeneration +%}"
    "{% if loop.last %}{% break %}{% endif %}{% endfor %}"
    "{% if not messages %}{{ raise_exception(strftime_now('%Y')) }}{% endif %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}>{% endif %}"
)
USED = ["rounds", "tone", "suffix", "enable_thinking", "bos_token", "tools"]


def tokenizer(template: object = TEMPLATE) -> SimpleNamespace:
    return SimpleNamespace(chat_template=template)


@pytest.mark.parametrize("name", USED)
def test_what_the_template_reads_is_taken(name: str) -> None:
    assert checked_chat_template_kwargs(tokenizer(), {name: 1}) == {name: 1}
    assert checked_chat_template_kwargs(tokenizer({"default": "", "tool_use": TEMPLATE}), {name: 1}) == {name: 1}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"enable_thinkin": False}, "does not use 'enable_thinkin'; did you mean enable_thinking?"),
        ({"tone": 1, "Tone": 2}, "does not use 'Tone'; did you mean tone?"),
        ({"xyz": 1}, f"does not use 'xyz'; it uses {', '.join(sorted(USED))}"),
        *[({name: 1}, f"does not use '{name}'") for name in ("tokenize", "message", "line", "ns", "loop", "namespace")],
        *[({name: 1}, f"'{name}' is set already") for name in ("messages", "add_generation_prompt")],
        ({3: 1}, "does not use 3"),
        ("enable_thinking", "must map names to values"),
        ([("tone", 1)], "must map names to values"),
    ],
)
def test_what_it_does_not_read_is_refused(kwargs: object, message: str) -> None:
    with pytest.raises(JetSpecError, match=r"^chat_template_kwargs") as caught:
        checked_chat_template_kwargs(tokenizer(), kwargs)
    assert message in str(caught.value)


def test_without_a_template_there_are_no_arguments() -> None:
    assert checked_chat_template_kwargs(tokenizer(None), {}) == checked_chat_template_kwargs(tokenizer(), None) == {}
    with pytest.raises(JetSpecError, match="chat_template_kwargs: the target has no chat template"):
        checked_chat_template_kwargs(tokenizer(None), {"tone": 1})
    with pytest.raises(JetSpecError, match="chat template is not valid"):
        checked_chat_template_kwargs(tokenizer("{% if %}"), {"tone": 1})
    with pytest.raises(JetSpecError, match="does not use 'tone'; it uses none"):
        checked_chat_template_kwargs(tokenizer(""), {"tone": 1})


def test_every_way_into_a_template_checks_its_arguments() -> None:
    llm = LLM(tiny_target(text=True), None, num_blocks=20)
    wrong = {"enable_thinking": False}
    for call in (
        lambda: llm.chat(TALK, chat_template_kwargs=wrong),
        lambda: llm.stream_chat(TALK, chat_template_kwargs=wrong),
        lambda: llm.encode_prompts(["hi"], chat_template_kwargs=wrong),
        lambda: llm.encode_prompts([TALK], chat=False, chat_template_kwargs=wrong),
        lambda: llm.render_chat(TALK, wrong),
    ):
        with pytest.raises(JetSpecError, match="the target's chat template does not use 'enable_thinking'"):
            call()


def test_arguments_reach_the_template() -> None:
    target = tiny_target(text=True)
    target.tokenizer = tiny_tokenizer()
    target.tokenizer.chat_template = TEMPLATE
    llm = LLM(target, None, num_blocks=20)
    assert llm.render_chat(TALK, {"suffix": "!", "enable_thinking": False}) == "(brief)hi!>"


@pytest.mark.parametrize("prompts", [["hi"], [[1, 2]]])
def test_arguments_that_no_prompt_uses_are_refused(prompts: list) -> None:
    llm = LLM(tiny_target(text=True), None, num_blocks=20)
    with pytest.raises(JetSpecError, match="chat_template_kwargs: no prompt goes through a chat template"):
        llm.encode_prompts(prompts, chat=False, chat_template_kwargs={"tone": 1})
    assert llm.encode_prompts(prompts, chat=False, chat_template_kwargs={})


@pytest.mark.parametrize("prompts", [None, 5, "ab", {}, [5], [None], [[True]], [[1.5]], [["a"]], *[[m] for m in TALK]])
def test_what_is_no_prompt_is_not_encoded(prompts: object) -> None:
    llm = LLM(tiny_target(text=True), None, num_blocks=20)
    with pytest.raises(JetSpecError, match=r"^prompt"):
        llm.encode_prompts(prompts)
