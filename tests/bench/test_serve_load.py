"""Open-loop load in virtual time: when requests are sent, what is recorded, and what the figures make of it."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from jetspec.bench.datasets import Question
from jetspec.bench.serve.config import ServeConfig
from jetspec.bench.serve.figures import Objectives, level_figures, milliseconds, spread
from jetspec.bench.serve.load import Planned, arrival_times, plan, request_of, run_level, warm_up
from jetspec.bench.serve.records import Answered, Level
from jetspec.client import CHAT, COMPLETIONS, Delta, ServerError, Usage
from jetspec.errors import JetSpecError

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose time passes only when it would wait, so that every time is exact."""

    def __init__(self) -> None:
        super().__init__(selectors.SelectSelector())
        self.now = 0.0
        wait = self._selector.select

        def select(timeout: float | None = None) -> Any:
            self.now += timeout or 0.0
            return wait(0)

        self._selector.select = select

    def time(self) -> float:
        return self.now


def in_virtual_time(run: Coroutine[Any, Any, T]) -> T:
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(run)
    finally:
        loop.close()


class Paced:
    """Stands for a server: streams (seconds to wait, what comes then), and notes when requests are sent."""

    def __init__(self, script: Callable[[Mapping[str, Any]], list[tuple[float, Delta | Exception]]]) -> None:
        self.script = script
        self.sent: list[tuple[float, Any]] = []
        self.running = 0
        self.peak = 0

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Delta]:
        self.sent.append((asyncio.get_running_loop().time(), body["n"]))
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            for seconds, event in self.script(body):
                await asyncio.sleep(seconds)
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            self.running -= 1


def steady(body: Mapping[str, Any]) -> list[tuple[float, Delta | Exception]]:
    """First text after 2 s, then two events of 4 tokens each after 1 s and 1 s; 9 tokens in all, the usage late."""
    return [
        (0.5, Delta()),
        (1.5, Delta("a")),
        (1.0, Delta("b c d e")),
        (1.0, Delta("f g h i", finish_reason="stop")),
        (3.0, Delta(usage=Usage(11, 9, rounds=2, decoded_tokens=8))),
    ]


def planned(*times: float) -> list[Planned]:
    return [Planned(f"q{n}", time, CHAT, {"n": n}) for n, time in enumerate(times)]


def level(client: Paced, *times: float, **options: Any) -> Level:
    return in_virtual_time(run_level(client, 1.0, planned(*times), **{"timeout_s": 100.0, **options}))


def test_arrivals_are_a_seeded_poisson_process() -> None:
    times = arrival_times(4.0, 20_000, 1e9, seed=3)
    gaps = np.diff([0.0, *times])
    assert len(times) == 20_000
    assert (gaps > 0).all()
    # Mean and standard deviation of an exponential distribution are equal.
    assert np.mean(gaps) == pytest.approx(0.25, rel=0.03)
    assert np.std(gaps) == pytest.approx(0.25, rel=0.03)
    assert times == arrival_times(4.0, 20_000, 1e9, seed=3)
    assert times[:5] != arrival_times(4.0, 5, 1e9, seed=4)
    assert arrival_times(2.0, 5, 1e9, seed=3) == pytest.approx([2 * time for time in times[:5]])


def test_arrivals_end_with_the_duration() -> None:
    times = arrival_times(10.0, 1000, 1e9, seed=0)
    assert arrival_times(10.0, 1000, times[19], seed=0) == times[:20]
    assert arrival_times(10.0, 1000, times[0] / 2, seed=0) == []


def test_requests_are_sent_at_their_times_whatever_the_server_does() -> None:
    client = Paced(steady)
    found = level(client, 0.25, 0.5, 4.0)
    assert client.sent == [(0.25, 0), (0.5, 1), (4.0, 2)]
    assert client.peak == 3
    first = found.requests[0]
    assert (first.question, first.arrival_s, first.sent_s) == ("q0", 0.25, 0.25)
    assert (first.first_token_s, first.last_token_s, first.end_s) == (2.25, 4.25, 7.25)
    assert (first.prompt_tokens, first.completion_tokens, first.rounds, first.decoded_tokens) == (11, 9, 2, 8)


def test_a_limit_of_concurrency_makes_requests_wait_and_the_wait_counts() -> None:
    client = Paced(steady)
    found = level(client, 1.0, 2.0, 3.0, max_concurrency=1)
    assert client.peak == 1
    assert client.sent == [(1.0, 0), (8.0, 1), (15.0, 2)]
    second = found.requests[1]
    assert (second.arrival_s, second.sent_s, second.first_token_s) == (2.0, 8.0, 10.0)
    assert milliseconds(second)["TTFT"] == pytest.approx(8000.0)
    figures = level_figures(found, Objectives({}))
    assert (figures.peak_running, figures.delay_s) == (1, 12.0)


def test_tpot_is_by_tokens_and_not_by_events() -> None:
    request = level(Paced(steady), 1.0).requests[0]
    assert milliseconds(request) == pytest.approx({"TTFT": 2000.0, "E2E": 4000.0, "TPOT": 2000.0 / 8})


def test_an_answer_without_text_has_a_first_token_but_no_tpot() -> None:
    client = Paced(lambda body: [(2.0, Delta(finish_reason="stop")), (0.0, Delta(usage=Usage(3, 1)))])
    request = level(client, 1.0).requests[0]
    assert milliseconds(request) == pytest.approx({"TTFT": 2000.0, "E2E": 2000.0})
    assert level_figures(Level(rate=1.0, requests=[request]), Objectives({})).acceptance_length is None


def test_failures_are_counted_by_cause_and_leave_the_others_alone() -> None:
    ends: dict[int, list[tuple[float, Delta | Exception]]] = {
        0: [(1.0, ServerError("HTTP 503", "busy"))],
        1: [(1.0, Delta("a")), (1.0, ServerError("broken stream", "over"))],
        2: [(1.0, Delta("a")), (1e6, Delta("b"))],
        3: [(1.0, Delta("a", finish_reason="stop"))],
        4: [(1.0, Delta(usage=Usage(1, 0)))],
        5: steady({}),
        6: [(1.0, ServerError("HTTP 503", "busy"))],
    }
    ended: list[Answered] = []
    found = level(Paced(lambda body: ends[body["n"]]), *range(1, 8), timeout_s=20.0, on_end=ended.append)
    causes = ["HTTP 503", "broken stream", "timeout", "no usage", "no tokens", None, "HTTP 503"]
    assert [request.error for request in found.requests] == causes
    assert (found.requests[2].first_token_s, found.requests[2].end_s) == (4.0, 23.0)
    assert len(ended) == 7
    figures = level_figures(found, Objectives({}))
    assert (figures.requests, figures.completed) == (7, 1)
    assert figures.errors == {"HTTP 503": 2, "broken stream": 1, "timeout": 1, "no usage": 1, "no tokens": 1}
    assert figures.duration_s == 23.0
    assert figures.completion_tokens_per_s == pytest.approx(9 / 23)


def test_an_unexpected_error_ends_the_level_and_what_still_runs() -> None:
    client = Paced(lambda body: [(1.0, ValueError("a fault"))] if body["n"] else [(1e6, Delta("a"))])
    with pytest.raises(ValueError, match="a fault"):
        level(client, 1.0, 2.0)
    assert client.running == 0


def test_the_warm_up_is_sequential_and_its_failure_is_raised() -> None:
    client = Paced(steady)
    in_virtual_time(warm_up(client, planned(0.0, 0.0, 0.0), 100.0))
    assert client.sent == [(0.0, 0), (7.0, 1), (14.0, 2)]
    for script, message in (
        ([(1.0, ServerError("HTTP 401", "wrong key"))], "wrong key"),
        ([(1e6, Delta("a"))], "took longer than timeout_s"),
        ([(1.0, Delta("a"))], "holds no usage"),
    ):
        with pytest.raises(ServerError, match=message):
            in_virtual_time(warm_up(Paced(lambda body, script=script: script), planned(0.0), 100.0))


def request(arrival: float = 0.0, first: float = 1.0, last: float = 2.0, tokens: int = 11, **rest: Any) -> Answered:
    facts = {"sent_s": arrival, "first_token_s": first, "last_token_s": last, "end_s": last}
    return Answered(question="q", arrival_s=arrival, **{**facts, **rest}, prompt_tokens=5, completion_tokens=tokens)


def test_figures_of_given_requests() -> None:
    requests = [
        request(0.0, 0.1, 1.1, rounds=4, decoded_tokens=10),  # TTFT 100 ms, TPOT 100 ms
        request(1.0, 1.5, 2.5, rounds=6, decoded_tokens=10),  # TTFT 500 ms, TPOT 100 ms
        request(2.0, 2.1, 4.1),  # TTFT 100 ms, TPOT 200 ms
        Answered(question="q", arrival_s=3.0, sent_s=3.0, end_s=5.0, error="timeout"),
    ]
    figures = level_figures(Level(rate=1.0, requests=requests), Objectives({"TTFT": 300.0, "TPOT": 150.0}))
    assert (figures.requests, figures.completed, figures.errors) == (4, 3, {"timeout": 1})
    assert figures.duration_s == 5.0
    assert figures.requests_per_s == pytest.approx(0.6)
    assert figures.prompt_tokens_per_s == pytest.approx(3.0)
    assert figures.completion_tokens_per_s == pytest.approx(6.6)
    assert (figures.goodput, figures.good) == (pytest.approx(0.2), pytest.approx(0.25))
    assert figures.acceptance_length == pytest.approx(2.0)
    assert figures.peak_running == 2
    assert figures.times["TTFT"].model_dump() == pytest.approx({"mean": 700 / 3, "p50": 100, "p95": 460, "p99": 492})
    assert figures.times["E2E"].p50 == pytest.approx(1500.0)
    assert level_figures(Level(rate=1.0, requests=requests), Objectives({})).goodput is None


def test_one_that_ends_when_another_starts_makes_room() -> None:
    requests = [request(0.0, 1.0, 2.0), request(2.0, 3.0, 4.0)]
    assert level_figures(Level(rate=1.0, requests=requests), Objectives({})).peak_running == 1


def test_percentiles_of_given_samples() -> None:
    found = spread([float(n) for n in range(101)])
    assert found.model_dump() == {"mean": 50.0, "p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert spread([3.0]).model_dump() == {"mean": 3.0, "p50": 3.0, "p95": 3.0, "p99": 3.0}


def config(**changes: Any) -> ServeConfig:
    return ServeConfig(**{"url": "http://localhost:1", "output": Path("x"), **changes})


QUESTIONS = [Question(str(n), n, (f"Question {n}",)) for n in range(6)]


def test_questions_are_asked_in_a_seeded_order_and_again_only_when_all_were_asked() -> None:
    settings = config(rates=(1.0, 4.0), num_requests=3, warm_up=2)
    first, levels = plan(QUESTIONS, "tiny", settings)
    asked = [r.question for r in [*first, *levels[0], *levels[1]]]
    assert sorted(asked[:6]) == [str(n) for n in range(6)]
    assert asked[6:] == asked[:2]
    assert [[r.arrival_s for r in requests] for requests in levels] == [
        arrival_times(1.0, 3, 1e9, 0),
        arrival_times(4.0, 3, 1e9, 0),
    ]
    other, _ = plan(QUESTIONS * 20, "tiny", config(seed=1, warm_up=100))
    assert [r.question for r in other] != [r.question for r in plan(QUESTIONS * 20, "tiny", config(warm_up=100))[0]]


def test_a_rate_too_low_for_the_duration_is_refused() -> None:
    with pytest.raises(JetSpecError, match=r"rates=0\.001: no request arrives within max_duration_s=2"):
        plan(QUESTIONS, "tiny", config(rates=(0.001,), max_duration_s=2.0))


def test_prompts_go_where_they_fit() -> None:
    def sent(prompt: Any, **changes: Any) -> tuple[str, dict[str, Any]]:
        return request_of(Question("q", 4, (prompt, "a later turn")), "tiny", config(max_tokens=5, **changes))

    fixed = {"model": "tiny", "max_tokens": 5, "temperature": 0.0}
    talk = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    assert sent("Hi") == (CHAT, {**fixed, "messages": [{"role": "user", "content": "Hi"}]})
    assert sent("Hi", endpoint="completions") == (COMPLETIONS, {**fixed, "prompt": "Hi"})
    assert sent([1, 2]) == (COMPLETIONS, {**fixed, "prompt": [1, 2]})
    assert sent(talk) == (CHAT, {**fixed, "messages": talk})
    _, body = sent("Hi", temperature=0.5, extra_body={"ignore_eos": True})
    assert body == {**fixed, "temperature": 0.5, "seed": 4, "ignore_eos": True, "messages": body["messages"]}
    with pytest.raises(JetSpecError, match="question q is a conversation; use chat"):
        sent(talk, endpoint="completions")
