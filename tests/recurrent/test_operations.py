"""Recurrences and convolutions over trees against transformers' own functions, path by path, token by token."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from jetspec.attention import RowBatch, Segment
from jetspec.errors import JetSpecError
from jetspec.models.recurrent import BatchStates, row_convolution, row_gated_delta_rule, row_mamba2
from jetspec.recurrent.linear import decay_between
from jetspec.recurrent.plan import RowPlan
from jetspec.recurrent.states import EMPTY_STATE, RecurrentStates, StateShape, StateWrite
from tests.helpers.forest import depths, paths, random_parents

HEADS, DK, DV, CHANNELS, WIDTH = 4, 8, 6, 10, 4
TOLERANCE = 1e-4


def trees(sizes: list[int], contexts: list[int], seed: int = 0) -> RowBatch:
    """A random tree of each size behind a context of each length; a negative size is a chain."""
    rng, segments, parents, positions, start = random.Random(seed), [], [], [], 0
    for index, (size, context) in enumerate(zip(sizes, contexts, strict=True)):
        own = torch.arange(-1, -size - 1) if size < 0 else random_parents(size, rng)
        state = 1 + index if context else EMPTY_STATE
        segments.append(Segment(start, start + len(own), context, torch.arange(context + len(own)), state))
        parents.append(own)
        positions.append(context + depths(own))
        start += len(own)
    ids = torch.zeros(start, dtype=torch.int64)
    return RowBatch(ids, torch.cat(positions), torch.cat(parents), segments)


BATCHES = {
    "one tree": ([24], [5]),
    "no context": ([7, 16], [0, 0]),
    "ragged": ([1, 80, -3, 9, -150, -64], [3, 0, 8, 1, 4, 0]),
}
BATCH = pytest.mark.parametrize("batch", [trees(*BATCHES[name]) for name in BATCHES], ids=[*BATCHES])


def new_states(batch: RowBatch, size: tuple[int, ...], seed: int) -> RecurrentStates:
    states = RecurrentStates([StateShape(size, torch.float32)], len(batch.segments), 0, torch.device("cpu"))
    states.pools[0][1:] = torch.randn(states.pools[0][1:].shape, generator=torch.Generator().manual_seed(seed))
    return states


def rows_of_paths(batch: RowBatch) -> list[tuple[int, list[int]]]:
    """The rows of every path of every segment."""
    return [
        (segment.state, [segment.start + row for row in path])
        for segment in batch.segments
        for path in paths(batch.parents[segment.start : segment.stop])
    ]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert float((actual - expected).abs().max()) <= TOLERANCE


def assert_every_node_can_be_committed(
    batch: RowBatch, states: RecurrentStates, expected: dict[tuple[int, ...], Tensor]
) -> None:
    """The state behind each of these paths; it is written to a number of its own, and others stay as they are."""
    before, rows = states.pools[0].clone(), list(states.rows)
    sources = {segment.start: segment.state for segment in batch.segments}
    for path, state in expected.items():
        start = max(start for start in sources if start <= path[0])
        states.rows = list(rows)
        states.pools[0].copy_(before)
        states.commit([StateWrite(sources[start], list(path), 1)])
        assert_close(states.pools[0][1], state)
        assert torch.equal(states.pools[0][2:], before[2:])
        assert not states.pools[0][EMPTY_STATE].any()


@BATCH
@pytest.mark.parametrize("decay", [0.3, 30.0])
def test_gated_delta_rule(batch: RowBatch, decay: float) -> None:
    generator = torch.Generator().manual_seed(1)
    n = len(batch)
    query, key = (torch.randn(1, n, HEADS // 2, DK, generator=generator) for _ in range(2))
    value = torch.randn(1, n, HEADS, DV, generator=generator)
    g = -decay * torch.rand(1, n, HEADS, generator=generator)
    beta = torch.rand(1, n, HEADS, generator=generator)
    states = new_states(batch, (HEADS, DK, DV), seed=2)
    output, _ = row_gated_delta_rule(
        query,
        key,
        value,
        g=g,
        beta=beta,
        use_qk_l2norm_in_kernel=True,
        row_states=BatchStates(batch, states, finite=True),
    )
    ends = {}
    for state, path in rows_of_paths(batch):
        initial = states.pools[0][state][None]
        for stop in range(1, len(path) + 1) if len(path) < 40 else (10, 100, len(path)):
            rows = path[:stop]
            expected, end = qwen.torch_recurrent_gated_delta_rule(
                *(x[:, rows] for x in (query, key, value, g, beta)),
                initial_state=initial,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            ends[tuple(rows)] = end[0]
        assert_close(output[:, path], expected)
    assert_every_node_can_be_committed(batch, states, ends)


@BATCH
def test_mamba2(batch: RowBatch) -> None:
    generator = torch.Generator().manual_seed(1)
    n = len(batch)
    inputs = torch.randn(1, n, HEADS, DV, generator=generator)
    dt = torch.randn(1, n, HEADS, generator=generator)
    b, c = (torch.randn(1, n, HEADS // 2, DK, generator=generator) for _ in range(2))
    a, d, bias = -4 * torch.rand(HEADS, generator=generator), torch.randn(HEADS), torch.randn(HEADS)
    states = new_states(batch, (HEADS, DK, DV), seed=2)
    output = row_mamba2(
        inputs,
        dt,
        a,
        b,
        c,
        D=d,
        dt_bias=bias,
        dt_softplus=True,
        row_states=BatchStates(batch, states, finite=True),
    )
    ends = {}
    for state, path in rows_of_paths(batch):
        initial = states.pools[0][state].mT[None]  # transformers keeps [dv, dk]
        for stop in range(1, len(path) + 1) if len(path) < 40 else (10, 100, len(path)):
            rows = path[:stop]
            expected, end = nemotron.mamba2_chunk_scan(
                *(x[:, rows] for x in (inputs, dt)),
                a,
                *(x[:, rows] for x in (b, c)),
                chunk_size=16,
                D=d,
                dt_bias=bias,
                dt_softplus=True,
                initial_states=initial,
                return_final_states=True,
            )
            ends[tuple(rows)] = end[0].mT
        assert_close(output[:, path], expected)
    assert_every_node_can_be_committed(batch, states, ends)


@BATCH
@pytest.mark.parametrize("activation", [None, "silu"])
def test_convolution(batch: RowBatch, activation: str | None) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(1, CHANNELS, len(batch), generator=generator)
    weight = torch.randn(CHANNELS, WIDTH, generator=generator)
    bias = torch.randn(CHANNELS, generator=generator)
    states = new_states(batch, (WIDTH - 1, CHANNELS), seed=2)
    output = row_convolution(inputs, weight, bias, activation, row_states=BatchStates(batch, states, finite=True))
    ends = {}
    for state, path in rows_of_paths(batch):
        known = torch.cat([states.pools[0][state].T[None], inputs[:, :, path]], dim=-1)
        expected = qwen.causal_conv1d_fn(known, weight, bias, activation)[:, :, WIDTH - 1 :]
        assert_close(output[:, :, path], expected)
        for stop in range(1, len(path) + 1):
            ends[tuple(path[:stop])] = known[0, :, stop : stop + WIDTH - 1].T
    assert_every_node_can_be_committed(batch, states, ends)


@pytest.mark.parametrize("finite", [True, False])
def test_rows_that_are_not_finite_spoil_their_descendants_only(finite: bool) -> None:
    """With finite=True sequences are kept apart; with finite=False the branches of a tree are, too."""
    batch = trees([12, 5], [3, 2])
    generator = torch.Generator().manual_seed(1)
    n = len(batch)
    query, key, value = (torch.randn(1, n, HEADS, DK, generator=generator) for _ in range(3))
    g, beta = -torch.rand(1, n, HEADS, generator=generator), torch.rand(1, n, HEADS, generator=generator)
    states = new_states(batch, (HEADS, DK, DK), seed=2)

    def outputs(finite: bool) -> Tensor:
        rows = BatchStates(batch, states, finite=finite)
        return row_gated_delta_rule(query, key, value, g=g, beta=beta, row_states=rows)[0][0]

    clean = outputs(True)
    spoiled = 4
    value[0, spoiled] = float("inf")
    below = {row for _, path in rows_of_paths(batch) if spoiled in path for row in path[path.index(spoiled) :]}
    kept = [row for row in range(n) if row not in below and (row >= 12 or not finite)]
    found = outputs(finite)
    assert len(below) > 1
    assert torch.allclose(found[kept], clean[kept], atol=1e-5)
    assert not found[list(below)].isfinite().all(-1).any()


def test_a_plan_serves_convolutions_of_several_widths() -> None:
    batch = trees([7, -5], [3, 0])
    segments = [(segment.start, segment.stop) for segment in batch.segments]
    shared = RowPlan(batch.parents, segments, batch.device)
    for width in (2, 4, 2):
        own = RowPlan(batch.parents, segments, batch.device)
        assert torch.equal(shared.taps(width), own.taps(width))


def test_a_decay_behind_a_great_one_keeps_its_digits() -> None:
    log_decay = torch.tensor([-30000.0, -0.1, -0.2]).view(1, 3, 1)
    _, between = decay_between(log_decay, torch.ones(1, 3, 3, dtype=torch.bool).tril())
    assert_close(between[0, 0, 2, :2].log(), torch.tensor([-0.3, -0.2]))


def test_a_sequence_with_committed_tokens_needs_its_state() -> None:
    batch = trees([3, 2], [0, 4])
    batch.segments[1] = replace(batch.segments[1], state=EMPTY_STATE)
    with pytest.raises(JetSpecError, match=r"segments\[1\] has 4 committed tokens and no recurrent state"):
        BatchStates(batch, new_states(batch, (HEADS, DK, DV), seed=2), finite=True)


def test_a_commit_lets_go_of_the_rows() -> None:
    batch = trees([2], [4])
    states = new_states(batch, (WIDTH - 1, CHANNELS), seed=2)
    states.rows[0] = torch.zeros(2, CHANNELS)
    states.commit([StateWrite(1, [0], 1)])
    assert states.rows == [None]
