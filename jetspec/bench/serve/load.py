"""Open-loop load: requests are sent at times drawn beforehand, whatever the server does with those before them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jetspec.bench.datasets import Question
from jetspec.bench.serve.config import ServeConfig
from jetspec.bench.serve.records import Answered, Level
from jetspec.client import CHAT, COMPLETIONS, Delta, ServerError
from jetspec.errors import JetSpecError
from jetspec.prompts import is_conversation


class Client(Protocol):
    """What sends a request, as `jetspec.client.OpenAIClient` does."""

    def stream(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Delta, None]:
        """Yield what the answer to a request adds, event by event. Raises ServerError."""


@dataclass(frozen=True)
class Planned:
    """A request and when to send it, in seconds since the start of its level."""

    question: str
    arrival_s: float
    path: str
    body: Mapping[str, Any]


def arrival_times(rate: float, num_requests: int, max_duration_s: float, seed: int) -> list[float]:
    """Times of a Poisson process, in seconds: the gaps are drawn from an exponential distribution of mean 1 / rate.

    The same seed gives the same pattern at every rate, stretched.

    Args:
        rate: mean requests a second.
        num_requests: the number of times, at most.
        max_duration_s: times after it are left out.
        seed: of the draws.
    """
    gaps = np.random.default_rng(seed).exponential(1.0, num_requests)
    times = np.cumsum(gaps) / rate
    return [float(time) for time in times[times <= max_duration_s]]


def plan(questions: Sequence[Question], model: str, config: ServeConfig) -> tuple[list[Planned], list[list[Planned]]]:
    """The requests of the warm-up, and those of each rate.

    Questions are taken in a random order, over all rates, so that a server can answer from its prefix cache only once
    all of them have been asked.

    Raises:
        JetSpecError: a prompt does not fit the endpoint, or no request would be sent at a rate.
    """
    order = np.random.default_rng(config.seed).permutation(len(questions))
    taken = 0

    def take(arrival_s: float) -> Planned:
        nonlocal taken
        question = questions[order[taken % len(questions)]]
        taken += 1
        path, body = request_of(question, model, config)
        return Planned(question.id, arrival_s, path, body)

    warm_up = [take(0.0) for _ in range(config.warm_up)]
    levels = []
    for rate in config.rates:
        times = arrival_times(rate, config.num_requests, config.max_duration_s, config.seed)
        if not times:
            raise JetSpecError(f"rates={rate:g}: no request arrives within max_duration_s={config.max_duration_s:g}")
        levels.append([take(time) for time in times])
    return warm_up, levels


def request_of(question: Question, model: str, config: ServeConfig) -> tuple[str, dict[str, Any]]:
    """The path and the body of a request that asks the first turn of a question. JetSpecError if it cannot be sent."""
    prompt = question.turns[0]
    body: dict[str, Any] = {"model": model, "max_tokens": config.max_tokens, "temperature": config.temperature}
    if config.temperature > 0:
        body["seed"] = question.number
    body.update(config.extra_body or {})
    if isinstance(prompt, str) and config.endpoint == "chat":
        return CHAT, {**body, "messages": [{"role": "user", "content": prompt}]}
    if not is_conversation(prompt):
        return COMPLETIONS, {**body, "prompt": prompt}
    if config.endpoint == "completions":
        raise JetSpecError(f"endpoint='completions': question {question.id} is a conversation; use chat")
    return CHAT, {**body, "messages": prompt}


async def warm_up(client: Client, requests: Sequence[Planned], timeout_s: float) -> None:
    """Send requests one after the other.

    Raises:
        ServerError: one of them failed, so the load test would measure failures.
    """
    for request in requests:
        answered = await send(client, request, asyncio.get_running_loop().time(), timeout_s, fail=True)
        assert answered.error is None, "failures are raised"


async def run_level(
    client: Client,
    rate: float,
    requests: Sequence[Planned],
    *,
    timeout_s: float,
    max_concurrency: int | None = None,
    on_end: Callable[[Answered], None] = lambda _: None,
) -> Level:
    """Send the requests of a level at their times, and wait until all of them have ended.

    Args:
        client: what sends them.
        rate: the rate that their times were drawn for.
        requests: in the order of their arrival.
        timeout_s: seconds after which a request that was sent counts as failed.
        max_concurrency: requests that run at a time, at most. Others wait in order of arrival. None: no limit.
        on_end: called with every request that has ended.
    """
    loop = asyncio.get_running_loop()
    places = asyncio.Semaphore(max_concurrency or len(requests))
    start = loop.time()

    async def answer(request: Planned) -> Answered:
        async with places:
            answered = await send(client, request, start, timeout_s)
        on_end(answered)
        return answered

    tasks: list[asyncio.Task[Answered]] = []
    try:
        for request in requests:
            await asyncio.sleep(max(0.0, start + request.arrival_s - loop.time()))
            tasks.append(asyncio.create_task(answer(request)))
        return Level(rate=rate, requests=list(await asyncio.gather(*tasks)))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # so that no stream outlives the level


async def send(client: Client, request: Planned, start: float, timeout_s: float, *, fail: bool = False) -> Answered:
    """Send a request and note when its tokens come.

    Args:
        client: what sends it.
        request: what is sent.
        start: time of the event loop that the recorded times count from.
        timeout_s: seconds after which it counts as failed.
        fail: raise the error of a request that fails, instead of recording it.

    Raises:
        ServerError: only with ``fail``.
    """
    loop = asyncio.get_running_loop()
    facts: dict[str, Any] = {"question": request.question, "arrival_s": request.arrival_s}
    # The clock of a loop may be a little coarse: a timer can fire early by its resolution.
    facts["sent_s"] = max(loop.time() - start, request.arrival_s)
    try:
        await asyncio.wait_for(_read(client, request, start, facts), timeout_s)
        for name in ("last_token_s", "completion_tokens"):
            if name not in facts:
                what = "tokens" if name == "last_token_s" else "usage"
                raise ServerError(f"no {what}", f"the server's stream holds no {what}, so nothing can be measured")
    except (ServerError, asyncio.TimeoutError) as error:
        if fail:
            raise error if isinstance(error, ServerError) else ServerError(*_TIMEOUT) from error
        facts["error"] = error.kind if isinstance(error, ServerError) else _TIMEOUT[0]
        facts = {name: value for name, value in facts.items() if name in _KEPT_OF_FAILED}
    return Answered(**facts, end_s=max(loop.time() - start, facts["sent_s"]))


_TIMEOUT = ("timeout", "the request took longer than timeout_s; raise it, or check the server")
_KEPT_OF_FAILED = ("question", "arrival_s", "sent_s", "first_token_s", "error")


async def _read(client: Client, request: Planned, start: float, facts: dict[str, Any]) -> None:
    """Read the stream of a request, and put the times and the counts into ``facts``."""
    loop = asyncio.get_running_loop()
    async with aclosing(client.stream(request.path, request.body)) as stream:
        async for delta in stream:
            if delta.has_tokens:
                facts["last_token_s"] = max(loop.time() - start, facts["sent_s"])
                facts.setdefault("first_token_s", facts["last_token_s"])
            if delta.usage is not None:
                facts["prompt_tokens"] = delta.usage.prompt_tokens
                facts["completion_tokens"] = delta.usage.completion_tokens
                facts["rounds"], facts["decoded_tokens"] = delta.usage.rounds, delta.usage.decoded_tokens
