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


#: Seeds by architecture that together see everything above.
SEEDS = {"llama": [1, 3], "qwen3": [0, 2, 3], "qwen3_moe": [1, 2], "gemma3": [0, 1, 4]}


def test_some_workloads_of_each_architecture() -> None:
    seen: Counter[str] = Counter()
    for kind, seeds in SEEDS.items():
        bench = Bench(kind)
        for seed in seeds:
            seen += check_workload(bench, seed)
    assert {name for name in HAPPENS if not seen[name]} == set()


def test_a_workload_in_bf16() -> None:
    """A batch-invariant target leaves no room for rounding: log probabilities are equal to the bit."""
    check_workload(Bench("gemma3", torch.bfloat16, batch_invariant=True), 0, tolerance=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TINY_MODELS)
def test_many_workloads(kind: str, workloads: int) -> None:
    bench = Bench(kind)
    seen: Counter[str] = Counter()
    for seed in range(workloads):
        seen += check_workload(bench, seed)
    assert workloads < ENOUGH or {name for name in HAPPENS if not seen[name]} == set()


@pytest.mark.slow
@pytest.mark.parametrize("kind", TINY_MODELS)
def test_many_workloads_in_bf16(kind: str, workloads: int) -> None:
    bench = Bench(kind, torch.bfloat16, batch_invariant=True)
    for seed in range(max(1, workloads // 10)):
        check_workload(bench, seed, tolerance=0)
