"""Every field of a message is rendered by the chat template and trained on, or its row is refused by name."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jetspec.errors import JetSpecError
from jetspec.models.target import Target
from jetspec.prompts import BadRows, Message, Row
from jetspec.train import TrainConfig
from jetspec.train.data import training_prompts
from jetspec.train.prompts import Answer, Ask, Prompt, answer_rows, turns
from jetspec.train.render import Renderer

#: Fields that chat formats give an assistant's turn beside its content.
FIELDS: dict[str, Any] = {
    "reasoning_content": "one and one",
    "reasoning": "one and one",
    "thinking": "one and one",
    "weight": 0,
    "citations": ["a book"],
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
USER: Message = {"role": "user", "content": "1+1?"}
ANSWER: Message = {"role": "assistant", "content": "2"}
#: Writes a field called `extra` where a message has one, of the last message only, as thinking is written.
EXTRA = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.FIELD and loop.last %}({{ m.FIELD }}){% endif %}{{ m.content }}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
#: Like the template of a model that always thinks: it opens the thought itself, and shows none of earlier turns.
OPENS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{{ m.thinking and '' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)


def with_template(target: Target, template: str) -> Target:
    other = copy.copy(target)
    other.tokenizer = copy.deepcopy(target.tokenizer)
    other.tokenizer.chat_template = template
    return other


def prompts_of(target: Target, messages: list[Message], **options: Any) -> list[Prompt]:
    bad = BadRows()
    written = Answer("4", (1, 2), True)

    def answerer(asks: list[Ask]) -> list[Answer | JetSpecError]:
        return [written for _ in asks]

    row = Row("row 7", messages)
    [prompts] = answer_rows([row], lambda r: turns(r, Renderer(target), **options), answerer, bad)
    bad.raise_if_any()
    return prompts


def text(target: Target, ids: tuple[int, ...] | None) -> str:
    return target.tokenizer.decode(list(ids or ()))


@pytest.mark.parametrize("field", [name for name in FIELDS if name != "tool_calls"])  # a call is context, no answer
def test_a_field_that_the_template_writes_is_trained_on(target: Target, field: str) -> None:
    writing = with_template(target, EXTRA.replace("FIELD", field))
    value = FIELDS[field] or 1
    [prompt] = prompts_of(writing, [USER, {**ANSWER, field: value}])
    assert text(writing, prompt.token_ids) == "<|user|>1+1?<|end|>\n<|assistant|>"
    assert text(writing, prompt.response_ids) == f"({value})2<|end|>"
    # It is the answer's own turn that counts: later prompts show what the template shows of it.
    first, second = prompts_of(writing, [USER, {**ANSWER, field: value}, USER, {**ANSWER, field: value}])
    assert first == prompt
    assert "(" not in text(writing, second.token_ids)
    assert second.response_ids == prompt.response_ids


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_a_field_that_the_template_leaves_out_is_refused(target: Target, role: str, field: str) -> None:
    turn = {"role": role, "content": "so", field: FIELDS[field]}
    messages = {"user": [turn], "assistant": [USER, turn, USER], "system": [turn, USER]}[role]
    number = messages.index(turn)
    with pytest.raises(JetSpecError, match=rf"row 7: messages\[{number}\]\.{field}: the chat template does not write"):
        prompts_of(target, messages)


@pytest.mark.parametrize("field", ["thinking", "reasoning_content"])
def test_a_thought_that_the_target_would_not_write_there_is_refused(target: Target, field: str) -> None:
    with pytest.raises(JetSpecError, match=rf"row 7: messages\[1\]\.{field}: the chat template"):
        prompts_of(with_template(target, OPENS), [USER, {**ANSWER, field: "one and one"}])
    inside = EXTRA.replace("FIELD", field).replace("<|assistant|>{% endif", "<|assistant|>(no thought){% endif")
    with pytest.raises(JetSpecError, match=rf"row 7: messages\[1\]\.{field}: the chat template does not begin"):
        prompts_of(with_template(target, inside), [USER, {**ANSWER, field: "one and one"}])


def test_fields_that_say_nothing_and_known_ones_are_no_fault(target: Target) -> None:
    known = {"name": "Ann", "tool_call_id": "x", "reasoning_content": "", "tool_calls": [], "thinking": None}
    assert prompts_of(target, [{**USER, **known}, {**ANSWER, **known}]) == prompts_of(target, [USER, ANSWER])


def test_an_answer_that_is_written_anew_needs_no_fields(target: Target) -> None:
    [prompt] = prompts_of(target, [USER, {**ANSWER, "thinking": "one"}], regenerate=True, ask_last=True)
    assert prompt.response_ids == (1, 2)


def test_a_file_is_refused_by_line_and_field(
    target: Target, make_config: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    path = tmp_path / "p.jsonl"
    rows = [{"messages": [USER, ANSWER]}, {"messages": [USER, {**ANSWER, "reasoning_content": "one"}]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(JetSpecError, match=r"p\.jsonl, line 2: messages\[1\]\.reasoning_content: "):
        training_prompts(
            target, make_config(prompts=path, eval_prompts=0), say=print, track=lambda _name: lambda *_: None
        )
