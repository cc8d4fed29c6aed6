"""Anchors, blocks and the order of steps."""

from __future__ import annotations

import torch

from jetspec.train.blocks import anchor_range, keyed_generator, make_blocks, plan_epoch, sample_anchors


def test_anchors_are_tokens_before_an_answered_one() -> None:
    assert list(anchor_range(length=8, loss_start=5)) == [4, 5, 6]
    assert list(anchor_range(length=3, loss_start=1)) == [1]
    assert list(anchor_range(length=5, loss_start=5)) == []


def test_anchors_are_distinct_sorted_and_seeded() -> None:
    first, again, other = (sample_anchors(50, 10, 12, keyed_generator(1, epoch, 7)).tolist() for epoch in (0, 0, 1))
    assert first == again != other
    assert first == sorted(set(first))
    assert len(first) == 12
    assert set(first) <= set(anchor_range(50, 10))
    assert sample_anchors(12, 10, 99, keyed_generator(0)).tolist() == [9, 10]


def test_blocks_predict_the_tokens_after_their_anchor() -> None:
    blocks = make_blocks(10, torch.tensor([2, 7]), block_size=4, gamma=2.0)
    # Token t + d is predicted from the final hidden state at t + d - 1.
    assert blocks.teacher_rows[0].tolist() == [2, 3, 4]
    expected = torch.exp(torch.tensor([0.0, -0.5, -1.0]))
    torch.testing.assert_close(blocks.weights[0], expected)
    torch.testing.assert_close(blocks.weights[1], expected * torch.tensor([1.0, 1.0, 0.0]))


def test_an_epoch_visits_every_sequence_with_blocks_once() -> None:
    counts = [3, 0, 5, 1, 8, 2, 2]
    plan = plan_epoch(counts, 6, seed=0, epoch=0)
    assert sorted(s for step in plan for s in step) == [0, 2, 3, 4, 5, 6]
    assert all(sum(counts[s] for s in step) >= 6 for step in plan[:-1])
    assert all(sum(counts[s] for s in step[:-1]) < 6 for step in plan)
    assert plan == plan_epoch(counts, 6, seed=0, epoch=0)
    assert plan != plan_epoch(counts, 6, seed=0, epoch=1)
