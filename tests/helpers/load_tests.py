"""A small hand-made load test that has everything a report must cope with."""

from __future__ import annotations

from typing import Any

from jetspec.bench.records import Header
from jetspec.bench.serve.records import Answered, Level, LoadTest


def answered(arrival_s: float, ttft_s: float, **facts: Any) -> Answered:
    """A request with an answer of 11 tokens that took a second after its first one."""
    first, last = arrival_s + ttft_s, arrival_s + ttft_s + 1.0
    times = {"sent_s": arrival_s, "first_token_s": first, "last_token_s": last, "end_s": last}
    counts = {"prompt_tokens": 5, "completion_tokens": 11}
    return Answered(question="q", arrival_s=arrival_s, **{**times, **counts, **facts})


def sample_load_test(*, factor: float = 1.0, **config: Any) -> LoadTest:
    """Two rates. At 1: TTFT of 100 and 200 ms x `factor`, acceptance 2.5. At 4: one of three failed, none reported."""
    settings = {"url": "http://localhost:1/v1", "model": "tiny", "slo_ttft_ms": 150.0, "slo_tpot_ms": None, **config}
    speculation = {"rounds": 4, "decoded_tokens": 10}
    slow = Level(
        rate=1.0,
        requests=[answered(0.0, 0.1 * factor, **speculation), answered(2.0, 0.2 * factor, **speculation)],
    )
    failed = Answered(question="q", arrival_s=0.5, sent_s=0.5, end_s=0.75, error="HTTP 503")
    fast = Level(rate=4.0, requests=[answered(0.0, 0.4), failed, answered(1.0, 0.4)])
    return LoadTest(Header(config=settings, machine={"cpu": "abacus"}), [fast, slow])
