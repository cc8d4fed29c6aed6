"""Row batches: who sees whom, where K/V goes, and what is refused."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec.attention import rows as rows_module
from jetspec.attention.rows import RowBatch, Segment, slot_index, visibility
from jetspec.errors import JetSpecError
from jetspec.tree import chain_parents
from tests.helpers.forest import depths, random_parents


def make_batch(sizes: list[tuple[int, int]], seed: int = 0) -> RowBatch:
    """Segments of (context length, rows), each a random tree, on shuffled slots."""
    rng, start, segments, parents, positions = random.Random(seed), 0, [], [], []
    for context, n in sizes:
        segments.append(Segment(start, start + n, context, torch.tensor(rng.sample(range(500), context + n))))
        parents.append(random_parents(n, rng))
        positions.append(context + depths(parents[-1]))
        start += n
    return RowBatch(torch.zeros(start, dtype=torch.int64), torch.cat(positions), torch.cat(parents), segments)


def sees(batch: RowBatch, index: int, row: int, key: int, window: int | None) -> bool:
    """One entry of the mask, from its definition."""
    segment = batch.segments[index]
    position = int(batch.positions[segment.start + row])
    if key < segment.context_len:
        visible, key_position = True, key
    else:
        wanted, ancestor = key - segment.context_len, row
        while ancestor not in (wanted, -1):
            ancestor = int(batch.parents[segment.start + ancestor])
        visible = ancestor == wanted
        key_position = int(batch.positions[segment.start + wanted])
    return visible and (window is None or key_position > position - window)


@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
def test_mask_is_the_context_the_ancestors_and_the_row_itself(window):
    batch = make_batch([(0, 7), (5, 1), (12, 9)])
    for index, segment in enumerate(batch.segments):
        n, keys = segment.num_rows, segment.context_len + segment.num_rows
        expected = [[sees(batch, index, row, key, window) for key in range(keys)] for row in range(n)]
        assert batch.mask(index, window).tolist() == expected


@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
def test_plan_keeps_every_visible_key(window):
    batch = make_batch([(0, 7), (5, 1), (12, 9)])
    for index, segment in enumerate(batch.segments):
        plan = batch.plan(index, window, torch.float32)
        mask = batch.mask(index, window)
        keys = torch.arange(500)[plan.keys]
        dropped = len(segment.slots) - len(keys)
        assert torch.equal(keys, segment.slots[dropped:])
        assert not mask[:, :dropped].any()
        visible = torch.ones_like(mask[:, dropped:]) if plan.bias is None else plan.bias == 0
        assert torch.equal(visible, mask[:, dropped:])


def test_plans_are_built_once():
    batch = make_batch([(4, 5)])
    assert batch.plan(0, 3, torch.float32).bias is batch.plan(0, 3, torch.float32).bias


def test_slot_mapping_is_where_the_new_rows_go():
    batch = make_batch([(2, 3), (4, 1)])
    expected = batch.segments[0].slots[2:].tolist() + batch.segments[1].slots[4:].tolist()
    assert batch.slot_mapping.tolist() == expected


def test_chain_and_tree_visibility_agree():
    assert torch.equal(visibility(chain_parents(9)), torch.ones(9, 9).tril().bool())
    parents = torch.tensor([-1, 0, 0, 1, -1, 4])
    expected = [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 0, 1, 0, 0, 0], [1, 1, 0, 1, 0, 0]]
    expected += [[0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 1, 1]]
    assert visibility(parents).int().tolist() == expected


@pytest.mark.parametrize(
    ("slots", "expected"),
    [([3, 4, 5], slice(3, 6)), ([7], slice(7, 8)), ([3, 5, 4, 6], None), ([5, 4, 3], None), ([3, 4, 6], None)],
)
def test_only_an_increasing_run_becomes_a_slice(slots, expected):
    index = slot_index(torch.tensor(slots), torch.device("cpu"))
    assert index == expected if expected else index.tolist() == slots


def rows(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.int64)


@pytest.mark.parametrize(
    ("parents", "segments", "message"),
    [
        ([-1, 1], [Segment(0, 2, 0, rows(2))], "parents"),
        ([-1, -2], [Segment(0, 2, 0, rows(2))], "parents"),
        ([-1, 0], [Segment(0, 1, 0, rows(1)), Segment(1, 2, 0, rows(1))], "parents"),
        ([-1, 0], [Segment(0, 1, 0, rows(1))], "cover"),
        ([-1, 0], [Segment(1, 2, 0, rows(1))], "segments"),
        ([-1, 0], [Segment(0, 0, 0, rows(0)), Segment(0, 2, 0, rows(2))], "segments"),
        ([-1, 0], [Segment(0, 2, 3, rows(2))], "slots"),
        ([-1, 0, 1], [Segment(0, 2, 0, rows(2))], "parents"),
    ],
)
def test_rows_that_do_not_fit_together_are_refused(parents, segments, message):
    with pytest.raises(JetSpecError, match=message):
        RowBatch(rows(2), rows(2), torch.tensor(parents), segments)


def test_ids_must_be_int64():
    with pytest.raises(JetSpecError, match="token_ids"):
        RowBatch(rows(1).int(), rows(1), torch.tensor([-1]), [Segment(0, 1, 0, rows(1))])


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), min_size=1, max_size=4))
def test_chains_are_rows_behind_what_is_committed(shapes: list[tuple[int, int]]) -> None:
    tokens = [[10 * s + i for i in range(n)] for s, (_, n) in enumerate(shapes)]
    slots = [torch.arange(context + n) + 100 * s for s, (context, n) in enumerate(shapes)]
    batch = RowBatch.chains(tokens, slots)
    row = 0
    for (context, n), new, own, segment in zip(shapes, tokens, slots, batch.segments, strict=True):
        rows = slice(row, row + n)
        assert batch.token_ids[rows].tolist() == new
        assert batch.positions[rows].tolist() == list(range(context, context + n))
        assert batch.parents[rows].tolist() == list(range(-1, n - 1))
        assert (segment.start, segment.stop, segment.context_len) == (row, row + n, context)
        assert torch.equal(segment.slots, own)
        row += n
    assert len(batch) == row


def test_a_batch_is_checked_once(monkeypatch):
    checks = []
    monkeypatch.setattr(rows_module, "check_rows", lambda batch: checks.append(batch))
    batch = RowBatch.chains([[5, 3, 9]], [torch.arange(7)])
    moved = batch.to("meta")  # where nothing can be read back
    assert len(checks) == 1
    assert moved.device == moved.positions.device == torch.device("meta")
    assert batch.id_range == moved.id_range == (3, 9)
    assert batch.max_position == moved.max_position == 6


def test_a_moved_batch_keeps_nothing_of_the_other_device():
    batch = RowBatch.chains([[5, 3, 9]], [torch.arange(7)])
    assert batch.slot_mapping.device.type == "cpu"
    assert batch.to("meta").slot_mapping.device.type == "meta"
    assert batch.slot_mapping.device.type == "cpu"
