"""The prompts file, and the split into prompts to train on and prompts held out.

A ``.jsonl`` file holds one object a line: the prompt under ``prompt``, ``question`` or ``text`` (a string),
``messages`` (a conversation) or ``prompt_token_ids``; and, where the target has answered already, ``response`` (a
string) or ``response_token_ids``. A conversation that ends with the assistant's turn holds its response. Any other file
is plain text with one prompt a line.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from jetspec.errors import JetSpecError
from jetspec.train.blocks import keyed_generator

TEXT_FIELDS = ("prompt", "question", "text")


@dataclass(frozen=True)
class Prompt:
    """A prompt as the target sees it, and its answer where that is known."""

    token_ids: tuple[int, ...]
    response_ids: tuple[int, ...] | None = None


def read_prompts(
    path: str | Path, tokenizer: PreTrainedTokenizerBase | None, *, chat: bool | None = None
) -> list[Prompt]:
    """Read a prompts file. ``chat`` puts prompts through the chat template (None: where there is one).

    Raises:
        JetSpecError: the file cannot be read or holds no prompt, or a line is not as described; names line and field.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise JetSpecError(f"prompts: cannot read {path}: {error}") from error
    encoder = _Encoder(tokenizer, chat)
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompts.append(_from_record(_parse(line), encoder) if path.suffix == ".jsonl" else encoder.prompt(line))
        except JetSpecError as error:
            raise JetSpecError(f"{path}, line {number}: {error}") from error
    if not prompts:
        raise JetSpecError(f"prompts: {path} holds none")
    return prompts


def split_prompts(
    prompts: list[Prompt], *, held_out: int, max_prompts: int | None, seed: int
) -> tuple[list[Prompt], list[Prompt]]:
    """(prompts to train on, prompts held out). The latter are drawn by ``seed``; copies of them are never trained on.

    Raises:
        JetSpecError: nothing would be left to train on.
    """
    order = torch.randperm(len(prompts), generator=keyed_generator(seed, "held out")).tolist()
    chosen = set(order[:held_out])
    evaluation = [prompts[i] for i in sorted(chosen)]
    kept_apart = {p.token_ids for p in evaluation}
    training = [p for i, p in enumerate(prompts) if i not in chosen and p.token_ids not in kept_apart]
    if not training:
        raise JetSpecError(
            f"eval_prompts={held_out}: leaves none of {len(prompts)} prompts to train on; hold out fewer or give more"
        )
    return training[:max_prompts], evaluation


class _Encoder:
    """Text and conversations to token ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, chat: bool | None) -> None:
        self._tokenizer = tokenizer
        has_template = getattr(tokenizer, "chat_template", None) is not None
        if chat and not has_template:
            raise JetSpecError("chat: the target has no chat template; switch chat off")
        self.chat = has_template if chat is None else chat

    @property
    def tokenizer(self) -> Any:
        if self._tokenizer is None:
            raise JetSpecError("the target has no tokenizer: give prompt_token_ids and response_token_ids")
        return self._tokenizer

    def prompt(self, text: str) -> Prompt:
        return Prompt(self.conversation([{"role": "user", "content": text}]) if self.chat else self.plain(text))

    def plain(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text))

    def conversation(self, messages: list[dict[str, str]]) -> tuple[int, ...]:
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise JetSpecError("messages: the target has no chat template; give the text under 'prompt'")
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def response(self, text: str) -> tuple[int, ...]:
        """A response's ids; it is whole, so the end-of-text token follows."""
        ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
        end = self.tokenizer.eos_token_id
        return ids if end is None else (*ids, end)


def _parse(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise JetSpecError(f"not valid JSON: {error}") from error
    if not isinstance(record, dict):
        raise JetSpecError("not a JSON object")
    return record


def _from_record(record: dict[str, Any], encoder: _Encoder) -> Prompt:
    response: tuple[int, ...] | None = None
    if "response_token_ids" in record:
        response = _ids(record, "response_token_ids")
    elif "response" in record:
        response = encoder.response(_text(record, "response"))
    if "prompt_token_ids" in record:
        return Prompt(_ids(record, "prompt_token_ids"), response)
    if "messages" in record:
        messages = _messages(record["messages"])
        if messages[-1]["role"] == "assistant":
            last = messages.pop()["content"]
            response = encoder.response(last) if response is None else response
        if not messages:
            raise JetSpecError("messages: no turn before the assistant's")
        return Prompt(encoder.conversation(messages), response)
    for name in TEXT_FIELDS:
        if name in record:
            return Prompt(encoder.prompt(_text(record, name)).token_ids, response)
    raise JetSpecError(f"no prompt: give one of {', '.join((*TEXT_FIELDS, 'messages', 'prompt_token_ids'))}")


def _text(record: dict[str, Any], name: str) -> str:
    value = record[name]
    if not isinstance(value, str) or not value:
        raise JetSpecError(f"{name}: must be a text that is not empty, got {value!r}")
    return value


def _ids(record: dict[str, Any], name: str) -> tuple[int, ...]:
    value = record[name]
    if not isinstance(value, list) or not value or any(type(i) is not int or i < 0 for i in value):
        raise JetSpecError(f"{name}: must be a list of token ids that is not empty")
    return tuple(value)


def _messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise JetSpecError("messages: must be a list of turns that is not empty")
    for index, turn in enumerate(value):
        if not isinstance(turn, dict) or not all(isinstance(turn.get(k), str) for k in ("role", "content")):
            raise JetSpecError(f"messages[{index}]: must be an object with the texts 'role' and 'content'")
    return [dict(turn) for turn in value]
