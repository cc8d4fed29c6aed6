"""The prompts of a run: read or written by the target, rendered, deduplicated, split and answered."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from jetspec.errors import JetSpecError
from jetspec.fingerprint import weights_fingerprint
from jetspec.models.target import Target
from jetspec.prompts import BadRows, Row, read_rows
from jetspec.train.answers import AnswerStore, EngineAnswers, OnProgress
from jetspec.train.config import TrainConfig
from jetspec.train.prompts import Answerer, Conversation, Prompt, answer_rows, split_held_out, turns, unique
from jetspec.train.render import Renderer
from jetspec.train.self_prompts import write_user_turns
from jetspec.train.server import ServerAnswers

ANSWERS = "answers.jsonl"
USER_TURNS = "self_prompts.jsonl"
FIX = "correct them, or skip them with on_bad_rows=skip"

Say = Callable[[str], None]
#: Makes the progress of a named piece of work.
Track = Callable[[str], OnProgress]


def training_prompts(
    target: Target, config: TrainConfig, *, say: Say, track: Track
) -> tuple[list[Prompt], list[Prompt]]:
    """The prompts to train on and the prompts held out. They depend on target and config alone.

    Answers of an earlier call are read from the output directory. A held-out conversation gives its last prompt, and
    none of its prompts is trained on.

    Returns:
        (prompts to train on, prompts held out).

    Raises:
        JetSpecError: a source cannot be read, a row cannot be used and is not to be skipped, or the answers fail.
    """
    bad = BadRows(skip=config.on_bad_rows == "skip")
    renderer = Renderer(target, chat=config.chat, template_kwargs=config.chat_template_kwargs)
    rows = [] if config.prompts is None else read_rows(config.prompts, bad)
    given = _rendered(rows, renderer, bad)
    bad.raise_if_any(say, FIX)
    if config.self_prompts:
        engine = _engine(target, config, USER_TURNS, track("writing prompts"))
        texts = write_user_turns(engine, renderer, config.self_prompts)
        given += _rendered([Row(f"self prompt {n}", text) for n, text in enumerate(texts, 1)], renderer, bad)
        bad.raise_if_any(say, FIX)
    distinct = unique(given, key=lambda c: tuple(p.token_ids for p in c.prompts))
    if len(distinct) < len(given):
        say(f"left out {len(given) - len(distinct)} prompts that occur more than once")
    chosen, apart = split_held_out(
        distinct, held_out=config.eval_prompts, max_prompts=config.max_prompts, seed=config.seed
    )
    if config.answers_from is not None or config.regenerate:
        progress = track("writing answers")
        if config.answers_from is None:
            answerer: Answerer = _engine(target, config, ANSWERS, progress)
        else:
            answerer = _server(config.answers_from, renderer, config, progress)
        start = partial(turns, renderer=renderer, regenerate=config.regenerate)
        ask_last = config.answers_from is not None
        training = answer_rows([c.row for c in chosen], partial(start, ask_last=ask_last), answerer, bad)
        held_out = answer_rows([c.row for c in apart], start, answerer, bad)
        bad.raise_if_any(say, FIX)
    else:
        training, held_out = [c.prompts for c in chosen], [c.prompts for c in apart]
    evaluation = [p for prompts in held_out for p in prompts]
    flat = [p for prompts in training for p in prompts]
    kept = unique(flat, key=lambda p: p.token_ids, seen=[p.token_ids for p in evaluation])
    if not kept:
        raise JetSpecError("prompts: none is left to train on; give more")
    return kept, [prompts[-1] for prompts in held_out if prompts]


def _rendered(rows: list[Row], renderer: Renderer, bad: BadRows) -> list[Conversation]:
    """Each row with its prompts behind the turns it gives itself."""
    rendered = answer_rows(rows, partial(turns, renderer=renderer), _unasked, bad)
    return [Conversation(row, prompts) for row, prompts in zip(rows, rendered, strict=True) if prompts]


def _unasked(_asks: object) -> list[JetSpecError]:
    raise AssertionError("turns that are given need no answer")


def _engine(target: Target, config: TrainConfig, file: str, progress: OnProgress) -> EngineAnswers:
    return EngineAnswers(
        target,
        AnswerStore(config.folder / file),
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        seed=config.seed,
        target_name=weights_fingerprint(target.model),
        max_num_seqs=config.max_num_seqs,
        progress=progress,
    )


def _server(url: str, renderer: Renderer, config: TrainConfig, progress: OnProgress) -> ServerAnswers:
    return ServerAnswers(
        url,
        model=config.answers_model or config.target,
        renderer=renderer,
        store=AnswerStore(config.folder / ANSWERS),
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        seed=config.seed,
        concurrency=config.answers_concurrency,
        api_key=_api_key(config.answers_key_env),
        template_kwargs=config.chat_template_kwargs,
        keep_failures=config.on_bad_rows == "skip",
        progress=progress,
    )


def _api_key(name: str | None) -> str | None:
    """The value of an environment variable that the user names."""
    if name is not None and name not in os.environ:
        raise JetSpecError(f"answers_key_env={name}: no such environment variable; export the API key under that name")
    return None if name is None else os.environ[name]
