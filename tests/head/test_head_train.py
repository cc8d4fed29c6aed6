"""The training forward: equal to inference, differentiable, and blind at and after each anchor."""

from __future__ import annotations

import pytest
import torch

from jetspec.errors import JetSpecError
from jetspec.head import DraftHead
from tests.helpers.tiny_head import WINDOWED, random_aux_hidden_states, tiny_head

BLOCK = 5
KINDS = [
    pytest.param({"causal": True}, id="causal"),
    pytest.param({"causal": False}, id="bidirectional"),
    pytest.param(dict(causal=True, **WINDOWED), id="causal-windowed"),
]


def inference(head: DraftHead, aux_hidden_states: torch.Tensor, embeds: torch.Tensor, anchor: int) -> torch.Tensor:
    cache = head.new_cache(8, 4)
    slots = torch.arange(anchor)
    head.extend(aux_hidden_states[:anchor], slots, slots, cache)
    return head.forward_blocks(embeds[None], torch.arange(anchor, anchor + BLOCK)[None], [slots], cache)[0]


def example(head: DraftHead, rows: int, blocks: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return random_aux_hidden_states(head, rows, generator), torch.randn(blocks, BLOCK, 32, generator=generator)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 1])
def test_equals_inference(kind, seed):
    head = tiny_head(seed, **kind)
    anchors = torch.tensor([0, 1, 5, 12, 5, 11, 3])  # 7 blocks in groups of 2: the last group is a ragged one
    aux_hidden_states, embeds = example(head, 12, len(anchors), seed)
    hidden = head.forward_train(head.context(aux_hidden_states), embeds, anchors)
    for a, anchor in enumerate(anchors.tolist()):
        assert torch.allclose(hidden[a], inference(head, aux_hidden_states, embeds[a], anchor), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_at_or_after_the_anchor_is_seen(kind):
    head = tiny_head(3, **kind)
    anchors = torch.tensor([0, 2, 7, 11])
    aux_hidden_states, embeds = example(head, 12, len(anchors), 3)
    context = head.context(aux_hidden_states).detach()
    before = head.forward_train(context, embeds, anchors)
    for a, anchor in enumerate(anchors.tolist()):
        changed = context.clone()
        changed[anchor:] += 3
        after = head.forward_train(changed, embeds, anchors)
        assert torch.equal(before[a], after[a])
        if anchor:
            changed = context.clone()
            changed[anchor - 1] += 3
            assert not torch.allclose(before[a], head.forward_train(changed, embeds, anchors)[a], atol=1e-3)


def test_no_gradient_reaches_the_anchor_or_anything_after_it():
    head = tiny_head(4)
    anchors = torch.tensor([3, 6, 9])
    aux_hidden_states, embeds = example(head, 12, 3, 4)
    for a, anchor in enumerate(anchors.tolist()):
        context = head.context(aux_hidden_states).detach().requires_grad_()
        head.forward_train(context, embeds, anchors)[a].square().sum().backward()
        reached = context.grad.abs().sum(1) > 0
        assert reached.tolist() == [row < anchor for row in range(12)]


@pytest.mark.parametrize("causal", [True, False])
def test_blocks_see_neither_each_other_nor_ahead_when_causal(causal):
    head = tiny_head(5, causal=causal)
    aux_hidden_states, embeds = example(head, 12, 3, 5)
    anchors, context = torch.tensor([4, 4, 8]), head.context(aux_hidden_states).detach()
    before = head.forward_train(context, embeds, anchors)
    for j in range(BLOCK):
        changed = embeds.clone()
        changed[1, j] += 1
        after = head.forward_train(context, changed, anchors)
        assert torch.equal(before[[0, 2]], after[[0, 2]])
        assert [torch.equal(before[1, i], after[1, i]) for i in range(BLOCK)] == [
            causal and i < j for i in range(BLOCK)
        ]


def test_every_parameter_gets_a_gradient():
    head = tiny_head(7)
    aux_hidden_states, embeds = example(head, 12, 3, 7)
    weights = torch.randn(3, BLOCK, 32, generator=torch.Generator().manual_seed(8))
    (head.forward_train(head.context(aux_hidden_states), embeds, torch.tensor([3, 6, 9])) * weights).sum().backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_shapes_that_do_not_fit_are_refused():
    head = tiny_head()
    context, embeds, anchors = torch.zeros(6, 32), torch.zeros(2, BLOCK, 32), torch.tensor([1, 2])
    with pytest.raises(JetSpecError, match="anchors"):
        head.forward_train(context, embeds, anchors[:1])
