"""From rows to what is trained on: one prompt with its answer for every turn of the assistant.

A conversation is not laid out as one sequence with several answers: what a template makes of an earlier turn is often
not what the target wrote there (thinking is dropped, an empty thought or a newline is added), so a later turn would be
trained behind a context that serving never shows. A prompt for each turn is rendered as the server renders it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch

from jetspec.errors import JetSpecError
from jetspec.prompts import BadRows, Message, PromptInput, Row, is_answer, is_conversation
from jetspec.train.blocks import keyed_generator
from jetspec.train.render import Renderer

T = TypeVar("T")


@dataclass(frozen=True)
class Prompt:
    """A prompt as the target sees it, and its answer where that is known."""

    token_ids: tuple[int, ...]
    response_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Conversation:
    """A row and its prompts, behind the earlier turns that the row gives."""

    row: Row
    prompts: list[Prompt]


@dataclass(frozen=True)
class Ask:
    """A turn that the target is to write."""

    token_ids: tuple[int, ...]
    prompt: PromptInput
    tools: list[Any] | None = None


@dataclass(frozen=True)
class Answer:
    """What the target wrote. ``finished`` is False where the longest answer cut it."""

    text: str
    token_ids: tuple[int, ...]
    finished: bool


#: Answers a batch, in order; an error stands for the answer that it prevented.
Answerer = Callable[[list[Ask]], Sequence[Answer | JetSpecError]]
Turns = Generator[Ask, Answer, list[Prompt]]


def turns(row: Row, renderer: Renderer, *, regenerate: bool = False, ask_last: bool = False) -> Turns:
    """The prompts of a row. Yields the turns that the target must write before it can go on, and is sent the answers.

    Answers that the row gives are used, or with ``regenerate`` written anew. The last turn, if it is to be written, is
    left without an answer unless ``ask_last``: nothing follows it. A conversation ends with an answer that was cut.

    Raises:
        JetSpecError: a turn cannot be rendered, has a field that the chat template leaves out, or does not fit the
            target.
    """
    prompts: list[Prompt] = []
    history, rounds = _rounds(row, renderer)
    for number, (before, given) in enumerate(rounds, 1):
        if before:
            first = len(history)
            history = [*history, *before]
            renderer.check_fields(cast("list[Message]", history), first=first, tools=row.tools)
        token_ids = renderer.prompt(history, row.tools)
        if given is not None and not regenerate:
            if isinstance(given, dict):
                prompts.append(Prompt(token_ids, renderer.turn(cast("list[Message]", history), given, row.tools)))
                history = [*history, given]
            else:
                prompts.append(Prompt(token_ids, renderer.answer(given)))
            continue
        if number == len(rounds) and not ask_last:
            prompts.append(Prompt(token_ids))
            break
        answer = yield Ask(token_ids, history, row.tools)
        prompts.append(Prompt(token_ids, answer.token_ids))
        if not answer.finished or number == len(rounds):
            break
        history = [*history, {"role": "assistant", "content": answer.text}]
    return prompts


def answer_rows(
    rows: Sequence[Row], start: Callable[[Row], Turns], answerer: Answerer, bad: BadRows
) -> list[list[Prompt]]:
    """The prompts of each row, all conversations one turn at a time; of those noted in ``bad``, none."""
    results: list[list[Prompt]] = [[] for _ in rows]
    waiting: list[tuple[int, Turns, Ask]] = []

    def advance(number: int, conversation: Turns, step: Callable[[], Ask]) -> None:
        with bad.at(rows[number].where):
            try:
                waiting.append((number, conversation, step()))
            except StopIteration as stop:
                results[number] = stop.value

    for number, row in enumerate(rows):
        conversation = start(row)
        advance(number, conversation, partial(next, conversation))
    while waiting:
        batch = waiting.copy()
        waiting.clear()
        answers = answerer([ask for _, _, ask in batch])
        for (number, conversation, _), answer in zip(batch, answers, strict=True):
            if isinstance(answer, JetSpecError):
                advance(number, conversation, partial(conversation.throw, answer))
            else:
                advance(number, conversation, partial(conversation.send, answer))
    return results


def unique(items: Iterable[T], key: Callable[[T], Hashable], seen: Iterable[Hashable] = ()) -> list[T]:
    """The first item of each key, in order, without those whose key is in ``seen``."""
    known, kept = set(seen), []
    for item in items:
        if (name := key(item)) not in known:
            known.add(name)
            kept.append(item)
    return kept


def split_held_out(items: Sequence[T], *, held_out: int, max_prompts: int | None, seed: int) -> tuple[list[T], list[T]]:
    """(items to train on, items held out). The latter are drawn by ``seed``; whole conversations, so none is in both.

    Raises:
        JetSpecError: nothing would be left to train on.
    """
    order = torch.randperm(len(items), generator=keyed_generator(seed, "held out")).tolist()
    chosen = set(order[:held_out])
    training = [item for i, item in enumerate(items) if i not in chosen]
    if not training:
        raise JetSpecError(
            f"eval_prompts={held_out}: leaves none of {len(items)} prompts to train on; hold out fewer or give more"
        )
    return training[:max_prompts], [items[i] for i in sorted(chosen)]


def _rounds(
    row: Row, renderer: Renderer
) -> tuple[PromptInput, list[tuple[list[Message], Message | str | list[int] | None]]]:
    """(where the row starts, [(turns before an answer, the answer given)])."""
    prompt = renderer.as_conversation(row.prompt)
    if not is_conversation(prompt):
        return prompt, [([], row.response)]
    rounds: list[tuple[list[Message], Message | str | list[int] | None]] = []
    before: list[Message] = []
    for turn in prompt:
        if is_answer(turn):
            rounds.append((before, turn))
            before = []
        else:
            before.append(turn)
    while before and before[-1]["role"] == "assistant":  # a call of a tool that nothing follows
        before.pop()
    if before:
        rounds.append((before, row.response))
    return [], rounds
