"""Random workloads: whatever else runs, comes, goes or fails, every request gets what it gets alone, undrafted."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.helpers.tiny import TINY_MODELS
from tests.helpers.workload import Bench, check_workload

#: Workloads of an architecture that together must have seen everything below.
ENOUGH = 50
HAPPENS = {
    "cancelled while decoding",
    "ended by abort",
    "ended by eos",
    "ended by error",
    "ended by int",
    "ended by length",
    "ended by str",
    "fully accepted",
    "partly accepted",
    "preempted",
    "prefix hit",
    "rejected",
    "stopped inside an accepted path",
}


@pytest.mark.parametrize("kind", TINY_MODELS)
def test_workloads(kind: str, workloads: int) -> None:
    bench = Bench(kind)
    seen: Counter[str] = Counter()
    for seed in range(workloads):
        seen += check_workload(bench, seed)
    assert workloads < ENOUGH or {name for name in HAPPENS if not seen[name]} == set()


@pytest.mark.parametrize("kind", TINY_MODELS)
def test_workloads_bf16(kind: str, workloads: int) -> None:
    """In exact mode half precision leaves no room for rounding: log probabilities are equal to the bit."""
    bench = Bench(kind, torch.bfloat16, batch_invariant=True)
    for seed in range(max(1, workloads // 10)):
        check_workload(bench, seed, tolerance=0)
