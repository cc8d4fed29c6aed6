"""Prompts that the target writes itself: it continues where its chat template opens the user's turn."""

from __future__ import annotations

from dataclasses import replace

from jetspec.errors import JetSpecError
from jetspec.train.answers import EngineAnswers
from jetspec.train.prompts import Answer
from jetspec.train.render import Renderer

TEMPERATURE = 1.0
TOP_P = 0.95
#: Tokens of a user's turn, its end included; others are dropped.
MIN_TOKENS, MAX_TOKENS = 4, 256
#: Turns that may be dropped for each that is kept.
PATIENCE = 20


def write_user_turns(answers: EngineAnswers, renderer: Renderer, count: int) -> list[str]:
    """``count`` distinct user turns. They are a function of the target and ``answers.seed``; stored ones are read.

    Raises:
        JetSpecError: there is no chat template, or the target repeats itself or does not end its turns.
    """
    user = renderer.user_turn()
    sampling = {"top_p": TOP_P, "stop_token_ids": list(user.stop_token_ids), "stop": list(user.stop)}
    room = answers.target.max_context - len(user.opening)
    answers = replace(answers, sampling=sampling, temperature=TEMPERATURE, max_tokens=min(MAX_TOKENS, room // 2))
    texts: dict[str, None] = {}
    tried = 0
    while len(texts) < count:
        if tried > PATIENCE * count:
            raise JetSpecError(
                f"self_prompts={count}: the target wrote only {len(texts)} usable user turns in {tried} tries; "
                "ask for fewer, or give prompts"
            )
        wanted = (count - len(texts)) * (tried + 1) // (len(texts) + 1)  # by how many were usable so far
        numbers = range(tried, tried + min(wanted, PATIENCE * count))
        for answer in answers.write([(user.opening, number) for number in numbers]):
            if isinstance(answer, Answer) and _usable(answer, renderer.special_ids):
                texts.setdefault(answer.text.strip())
        tried = numbers.stop
    return list(texts)[:count]


def _usable(answer: Answer, special_ids: frozenset[int]) -> bool:
    """Whether a turn was ended by the target, is not too short, and does not run on into another turn."""
    written = answer.token_ids[:-1]
    long_enough = len(answer.token_ids) >= MIN_TOKENS and bool(answer.text.strip())
    return answer.finished and long_enough and not special_ids.intersection(written)
