"""The figures of a load test, from its records alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jetspec.bench.serve.records import Answered, Level, LoadTest
from jetspec.config import Config

#: The times of a request, by their usual names.
TIMES = ("TTFT", "TPOT", "E2E")
PERCENTILES = (50, 95, 99)


class Spread(Config):
    """A time over the requests that have it, in milliseconds: the mean and percentiles.

    Percentiles lie between two samples where none is at the exact place (linear interpolation).
    """

    mean: float
    p50: float
    p95: float
    p99: float


class LevelFigures(Config):
    """The figures of a level. A figure is None if it does not apply.

    Args:
        rate: mean requests a second that were to be sent.
        requests: number of requests that were sent.
        completed: number of those that were answered.
        errors: number of the others, by cause.
        duration_s: seconds from the start of the level to the end of its last request.
        times: TTFT, TPOT and E2E of the completed requests; a time that none of them has is left out.
        requests_per_s: completed requests a second.
        prompt_tokens_per_s, completion_tokens_per_s: tokens of completed requests a second.
        goodput: completed requests a second that met every objective; None without objectives.
        good: share of the requests sent that met every objective; None without objectives.
        peak_running: most requests that ran at a time.
        delay_s: longest time that a request waited for a free place before it was sent.
        acceptance_length: tokens per verify forward, over the requests whose speculation the server reports.
    """

    rate: float
    requests: int
    completed: int
    errors: dict[str, int]
    duration_s: float
    times: dict[str, Spread]
    requests_per_s: float
    prompt_tokens_per_s: float
    completion_tokens_per_s: float
    goodput: float | None
    good: float | None
    peak_running: int
    delay_s: float
    acceptance_length: float | None


@dataclass(frozen=True)
class Objectives:
    """The most milliseconds that each time of a good request may have, by the names in `TIMES`."""

    limits: dict[str, float]

    @classmethod
    def of(cls, config: dict[str, Any]) -> Objectives:
        """The objectives among the settings of a run."""
        found = {name: config.get(f"slo_{name.lower()}_ms") for name in TIMES}
        return cls({name: float(limit) for name, limit in found.items() if limit is not None})

    def met_by(self, request: Answered) -> bool:
        """Whether a completed request met all of them. A time that it has not is no reason against it."""
        found = milliseconds(request)
        return all(found[name] <= limit for name, limit in self.limits.items() if name in found)


def figures(test: LoadTest) -> list[LevelFigures]:
    """Figures of every level, by rising rate."""
    objectives = Objectives.of(test.header.config)
    return [level_figures(level, objectives) for level in sorted(test.levels, key=lambda level: level.rate)]


def level_figures(level: Level, objectives: Objectives) -> LevelFigures:
    """Figures of one level."""
    completed = [request for request in level.requests if request.error is None]
    seconds = max(request.end_s for request in level.requests)
    good = sum(objectives.met_by(request) for request in completed) if objectives.limits else None
    errors = Counter(request.error for request in level.requests if request.error is not None)
    return LevelFigures(
        rate=level.rate,
        requests=len(level.requests),
        completed=len(completed),
        errors=dict(errors.most_common()),
        duration_s=seconds,
        times=_times(completed),
        requests_per_s=len(completed) / seconds,
        prompt_tokens_per_s=sum(request.prompt_tokens or 0 for request in completed) / seconds,
        completion_tokens_per_s=sum(request.completion_tokens or 0 for request in completed) / seconds,
        goodput=None if good is None else good / seconds,
        good=None if good is None else good / len(level.requests),
        peak_running=_peak(level.requests),
        delay_s=max(request.sent_s - request.arrival_s for request in level.requests),
        acceptance_length=_acceptance_length(completed),
    )


def milliseconds(request: Answered) -> dict[str, float]:
    """The times of a completed request. One with less than two tokens has no TPOT.

    TTFT and E2E count from the arrival, so a wait for a free place belongs to them. TPOT is the mean over the tokens
    after the first, by the server's count: an event of the stream may bring several tokens.
    """
    assert request.first_token_s is not None, "completed"
    assert request.last_token_s is not None, "completed"
    found = {
        "TTFT": 1e3 * (request.first_token_s - request.arrival_s),
        "E2E": 1e3 * (request.last_token_s - request.arrival_s),
    }
    later = (request.completion_tokens or 0) - 1
    if later > 0:
        found["TPOT"] = 1e3 * (request.last_token_s - request.first_token_s) / later
    return found


def spread(values: Sequence[float]) -> Spread:
    """Mean and percentiles of at least one value."""
    p50, p95, p99 = (float(value) for value in np.percentile(values, PERCENTILES))
    return Spread(mean=float(np.mean(values)), p50=p50, p95=p95, p99=p99)


def _times(completed: Iterable[Answered]) -> dict[str, Spread]:
    found = [milliseconds(request) for request in completed]
    samples = {name: [times[name] for times in found if name in times] for name in TIMES}
    return {name: spread(values) for name, values in samples.items() if values}


def _peak(requests: Sequence[Answered]) -> int:
    """Most requests between sending and end at a time. One that ends when another is sent has made room for it."""
    changes = sorted([(r.sent_s, 1) for r in requests] + [(r.end_s, -1) for r in requests])
    return int(np.cumsum([change for _, change in changes]).max())


def _acceptance_length(completed: Iterable[Answered]) -> float | None:
    reported = [(r.rounds, r.decoded_tokens) for r in completed if r.rounds and r.decoded_tokens is not None]
    rounds = sum(count for count, _ in reported)
    return sum(tokens for _, tokens in reported) / rounds if rounds else None
