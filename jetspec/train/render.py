"""Prompts and answers as the token ids that the target sees in serving."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from jinja2 import TemplateError

from jetspec.errors import JetSpecError
from jetspec.inputs import checked_chat_template_kwargs
from jetspec.models.target import Target, encode_text
from jetspec.prompts import Message, PromptInput, is_conversation

#: Stands for a turn's content where a template's own words are looked for.
MARKER = "words-of-this-turn"
#: Fields of a message that a chat template may leave out: they say whose words these are, not what was said.
KNOWN_FIELDS = frozenset({"role", "content", "name", "tool_call_id"})


@dataclass(frozen=True)
class UserTurn:
    """How the chat template frames the user's words."""

    opening: tuple[int, ...]
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


class Renderer:
    """Renders for one target. ``chat`` puts texts through the chat template (None: where there is one).

    ``template_kwargs`` are passed to the template, as ``{"enable_thinking": False}``.

    Raises:
        JetSpecError: the chat template is asked for and there is none, or it does not use one of ``template_kwargs``.
    """

    def __init__(
        self, target: Target, *, chat: bool | None = None, template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self._target = target
        self._template_kwargs = checked_chat_template_kwargs(target.tokenizer, template_kwargs)
        template = getattr(target.tokenizer, "chat_template", None)
        if chat and template is None:
            raise JetSpecError("chat: the target has no chat template; leave chat out")
        self.has_template = template is not None
        self.chat = self.has_template if chat is None else chat

    def as_conversation(self, prompt: PromptInput) -> PromptInput:
        """A text as the user's turn, where texts go through the chat template."""
        return [{"role": "user", "content": prompt}] if self.chat and isinstance(prompt, str) else prompt

    def prompt(self, prompt: PromptInput, tools: list[Any] | None = None) -> tuple[int, ...]:
        """Token ids of a text (as it is), of token ids (checked) or of a conversation, ready for the assistant.

        Raises:
            JetSpecError: it cannot be rendered, or does not fit the target.
        """
        if isinstance(prompt, str):
            ids = self._encode(prompt, add_special_tokens=True)
        elif is_conversation(prompt):
            ids = self._encode(self._render(prompt, tools=tools))
        else:
            ids = tuple(cast("list[int]", prompt))
        self._check(ids)
        most = self._target.max_context - 2
        if len(ids) > most:
            raise JetSpecError(f"{len(ids)} tokens, the target's context holds {most} with an answer; shorten it")
        return ids

    def answer(self, words: str | list[int], finished: bool = True) -> tuple[int, ...]:
        """Token ids of an answer. A finished text is followed by the token that ends the target's turn."""
        if not isinstance(words, str):
            self._check(tuple(words))
            return tuple(words)
        ids = self._encode(words)
        end = self._answer_end if finished else None
        return ids if end is None else (*ids, end)

    def turn(self, history: list[Message], turn: Message, tools: list[Any] | None = None) -> tuple[int, ...]:
        """Token ids of an assistant's ``turn`` behind ``history``, up to the token that ends it.

        These are the ids of its content. Where it has other fields, such as reasoning, they are what the chat template
        writes for the turn behind the words with which it opens an answer.

        Raises:
            JetSpecError: the template does not write one of the fields, or writes the turn behind another opening.
        """
        extra = _extra_fields(turn)
        if not extra:
            return self.answer(turn["content"])
        messages = [*history, turn]
        self.check_fields(messages, first=len(history), tools=tools, answering=False)
        opening = self._render(history, tools=tools)
        text = self._render(messages, tools=tools, answering=False)
        if not text.startswith(opening):
            raise JetSpecError(
                f"messages[{len(history)}].{extra[0]}: the chat template does not begin this turn as it begins the "
                "target's answers; set chat_template_kwargs to match, or remove the field"
            )
        ids = self._encode(text[len(opening) :])
        end = self._answer_end
        if end is None:
            return ids
        return ids[: len(ids) - ids[::-1].index(end)] if end in ids else (*ids, end)

    def check_fields(
        self, messages: list[Message], *, first: int = 0, tools: list[Any] | None = None, answering: bool = True
    ) -> None:
        """Check that the chat template writes every field of ``messages``, from number ``first`` on.

        A field is written where the text changes without it. Empty fields and ``KNOWN_FIELDS`` need not be.

        Raises:
            JetSpecError: the template leaves a field out; the message names it.
        """
        for number, message in enumerate(messages[first:], first):
            for name in _extra_fields(message):
                without = [*messages]
                without[number] = {key: value for key, value in message.items() if key != name}
                text = self._render(messages, tools=tools, answering=answering)
                try:
                    left_out = text == self._render(without, tools=tools, answering=answering)
                except JetSpecError:  # the template needs the field
                    left_out = False
                if left_out:
                    raise JetSpecError(
                        f"messages[{number}].{name}: the chat template does not write this field, so it would be lost; "
                        "move its text to a field that the template writes, or remove it"
                    )

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokenizer's special tokens."""
        return frozenset(self._tokenizer.all_special_ids)

    def user_turn(self) -> UserTurn:
        """What the chat template writes before the user's words, and what ends them.

        Raises:
            JetSpecError: the target has no chat template, or none that shows the user's words as they are.
        """
        if not self.chat:
            raise JetSpecError("self_prompts: needs the target's chat template; give prompts instead")
        before, marker, after = self._render([{"role": "user", "content": MARKER}]).partition(MARKER)
        opening = self._encode(before)
        if not marker or not opening:
            raise JetSpecError("self_prompts: the chat template does not open the user's turn; give prompts instead")
        first = self._encode(after.lstrip())[:1]
        if set(first) & set(self._tokenizer.added_tokens_decoder):
            return UserTurn(opening, stop_token_ids=first)
        return UserTurn(opening, stop=tuple(line for line in after.split("\n") if line.strip())[:1])

    @cached_property
    def _answer_end(self) -> int | None:
        """The end-of-text token with which the template ends the assistant's turn, else the tokenizer's."""
        if self.has_template:
            turns = [{"role": "user", "content": MARKER[::-1]}, {"role": "assistant", "content": MARKER}]
            after = self._render(turns, answering=False).partition(MARKER)[2]
            first = self._encode(after.lstrip())[:1]
            if set(first) & self._target.eos_token_ids:
                return first[0]
        end: int | None = self._tokenizer.eos_token_id
        return end

    def _render(self, messages: list[Message], *, tools: list[Any] | None = None, answering: bool = True) -> str:
        if not self.has_template:
            raise JetSpecError("messages: the target has no chat template; give the text under 'prompt'")
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=answering, **self._template_kwargs
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise JetSpecError(f"messages: the chat template refuses them: {error}") from error
        return text

    @property
    def _tokenizer(self) -> Any:
        if self._target.tokenizer is None:
            raise JetSpecError("the target has no tokenizer: give prompt_token_ids and response_token_ids")
        return self._target.tokenizer

    def _encode(self, text: str, *, add_special_tokens: bool = False) -> tuple[int, ...]:
        return tuple(encode_text(self._tokenizer, text, add_special_tokens=add_special_tokens))

    def _check(self, ids: tuple[int, ...]) -> None:
        if not ids or max(ids) >= self._target.vocab_size:
            raise JetSpecError(f"holds no ids, or ids outside the target's vocabulary of {self._target.vocab_size}")


def _extra_fields(message: Message) -> list[str]:
    """Fields that say something beside the known ones. 0 and False say something, empty texts and lists do not."""
    return [name for name, value in message.items() if name not in KNOWN_FIELDS and value not in (None, "", [], {})]
