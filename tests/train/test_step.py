"""One step's gradient: no look past the anchor, no weight on rows without loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from jetspec.head import DraftHead, head_for_target
from jetspec.models.target import Target
from jetspec.train import TrainConfig
from jetspec.train.blocks import keyed_generator, make_blocks, sample_anchors
from jetspec.train.capture import CaptureSettings, capture
from jetspec.train.dataset import Captured, CapturedSequences
from jetspec.train.prompts import Prompt
from jetspec.train.schedule import share_out
from jetspec.train.step import GradientStep
from tests.helpers.reference_head import reference_path

PROMPTS = [
    Prompt((4, 5, 6, 7), (8, 9, 10, 11, 12, 13)),
    Prompt((9, 8, 7), (20, 30)),
    Prompt((3, 2, 1, 5, 6), (7, 2, 4)),
]


@pytest.fixture
def data(target: Target, tmp_path: Path) -> CapturedSequences:
    capture(target, PROMPTS, tmp_path / "capture", CaptureSettings(target_layer_ids=(1, 3)))
    return CapturedSequences(tmp_path / "capture")


KINDS = ["parallel", "autoregressive"]


def new_head(target: Target, kind: str = "parallel", transition_size: int = 0) -> DraftHead:
    head = head_for_target(
        target,
        kind=kind,
        num_layers=2,
        block_size=4,
        target_layer_ids=(1, 3),
        mask_token_id=270 if kind == "parallel" else None,
        init="random",
        transition_size=transition_size,
    )
    if transition_size:  # a fresh one shifts nothing
        torch.nn.init.normal_(head.transition.out_proj.weight, generator=torch.Generator().manual_seed(0))
    return head


def gradients(head: DraftHead) -> list[torch.Tensor]:
    return [p.grad.clone() for p in head.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"transition_size": 5},
        {"weighting": "reach"},
        {"weighting": "reach", "transition_size": 5, "loss_temperature": 1.5, "hard_labels": 0.25},
    ],
    ids=str,
)
def test_loss_and_gradient_equal_a_readable_reference(
    target: Target, data: CapturedSequences, make_config: Callable[..., TrainConfig], options: dict
) -> None:
    config = make_config(**options)
    head = new_head(target, transition_size=config.transition_size)
    t, hard = config.loss_temperature, config.hard_labels
    loss, blocks = GradientStep(target, head, data, config)(0, 0, [0, 1, 2])
    ours = gradients(head)
    head.zero_grad()
    total = torch.zeros(())
    weight_sum = 0.0
    count = 0
    for index in range(3):
        sequence = data.read(index)
        length = len(sequence.token_ids)
        anchors = sample_anchors(length, sequence.loss_start, 8, keyed_generator(0, 0, index)).tolist()
        for number, anchor in enumerate(anchors):
            count += 1
            block = torch.tensor([[int(sequence.token_ids[anchor]), 270, 270, 270]])
            context = head.context(sequence.aux_hidden_states[:anchor].float())
            hidden = head.forward_train(context, target.embed(block), torch.tensor([anchor]))[0]
            reached, state = 1.0, None
            for depth in range(1, 4):
                if anchor + depth >= length:
                    continue
                drafted_from = hidden[depth]
                if head.transition is not None and number % 4:  # a quarter of the blocks is the layers' alone
                    before = target.embed(sequence.token_ids[anchor + depth - 1])
                    shift, state = head.transition(before.view(1, 1, -1), state)
                    drafted_from = drafted_from + shift[0, 0]
                weight = float(torch.exp(torch.tensor(-(depth - 1) / config.depth_gamma)))
                teacher = (target.lm_head(sequence.hidden[anchor + depth - 1].float()) / t).log_softmax(-1)
                drafted = (target.lm_head(drafted_from) / t).log_softmax(-1)
                divergence = functional.kl_div(drafted, teacher, log_target=True, reduction="sum")
                label = drafted[sequence.token_ids[anchor + depth]]
                total = total + weight * reached * t**2 * ((1 - hard) * divergence - hard * label)
                weight_sum += weight
                if config.weighting == "reach":
                    reached *= float(label.detach().exp())
    (total / weight_sum).backward()
    assert blocks == count
    assert loss == pytest.approx(float(total.detach()) / weight_sum, rel=1e-4)
    for mine, theirs in zip(ours, gradients(head), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


def test_an_unrolled_loss_equals_a_readable_reference(
    target: Target, data: CapturedSequences, make_config: Callable[..., TrainConfig]
) -> None:
    """The autoregressive head's: the same anchors, weights and teachers, every path run anew token by token."""
    config, head = make_config(), new_head(target, "autoregressive")
    loss, blocks = GradientStep(target, head, data, config)(0, 0, [0, 1, 2])
    total = weight_sum = 0.0
    count = 0
    for index in range(3):
        sequence = data.read(index)
        length = len(sequence.token_ids)
        embeds = target.embed(sequence.token_ids)
        for anchor in sample_anchors(length, sequence.loss_start, 8, keyed_generator(0, 0, index)).tolist():
            count += 1
            aux_hidden_states = sequence.aux_hidden_states[:anchor].float()
            hidden = reference_path(
                head.config, head.state_dict(), aux_hidden_states, embeds[: min(anchor + 3, length - 1)]
            )
            for depth, drafted in enumerate(hidden, 1):
                weight = math.exp(-(depth - 1) / config.depth_gamma)
                teacher = target.lm_head(sequence.hidden[anchor + depth - 1].float()).log_softmax(-1)
                logits = target.lm_head(drafted).log_softmax(-1)
                total += weight * float(functional.kl_div(logits, teacher, log_target=True, reduction="sum"))
                weight_sum += weight
    assert blocks == count
    assert loss == pytest.approx(total / weight_sum, rel=1e-4)
    assert all(gradient.isfinite().all() for gradient in gradients(head))


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_cannot_see_past_its_anchor(
    target: Target,
    data: CapturedSequences,
    make_config: Callable[..., TrainConfig],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """Perturbed aux_hidden_states from the last anchor on change nothing; those before it do."""
    config = make_config(blocks_per_sequence=1)
    read = data.read
    length, start = data.lengths[0], data.loss_starts[0]
    anchor = int(sample_anchors(length, start, 1, keyed_generator(config.seed, 0, 0)))

    def perturbed(first: int) -> Callable[..., Captured]:
        def changed(index: int, **_: object) -> Captured:
            # All rows are handed over, so that the head's mask alone keeps them out.
            whole = read(index)
            aux_hidden_states = whole.aux_hidden_states.clone()
            aux_hidden_states[first:] += 3
            return Captured(whole.token_ids, whole.loss_start, aux_hidden_states, whole.hidden)

        return changed

    losses = []
    for first in (10**6, anchor, anchor - 1):
        monkeypatch.setattr(data, "read", perturbed(first))
        losses.append(GradientStep(target, new_head(target, kind), data, config)(0, 0, [0])[0])
    assert losses[0] == losses[1] != losses[2]


def test_blocks_without_loss_do_not_dilute_the_average(
    target: Target, data: CapturedSequences, make_config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with an additional sequence whose blocks carry no loss has the loss and gradient of the step without."""
    from jetspec.train import step as step_module

    config = make_config()
    alone, together = new_head(target), new_head(target)
    loss, _ = GradientStep(target, alone, data, config)(0, 0, [0])

    def silent(length: int, *args: object) -> object:
        blocks = make_blocks(length, *args)
        if length == data.lengths[1]:
            blocks.weights.zero_()
        return blocks

    monkeypatch.setattr(step_module, "make_blocks", silent)
    step = GradientStep(target, together, data, config)
    assert step(0, 0, [0, 1])[0] == loss
    for a, b in zip(gradients(alone), gradients(together), strict=True):
        assert torch.equal(a, b)
    assert step(0, 0, [1])[0] == 0.0


def test_negatives_that_cover_the_vocabulary_change_nothing(
    target: Target, data: CapturedSequences, make_config: Callable[..., TrainConfig]
) -> None:
    whole, all_but_one, few = (
        GradientStep(target, new_head(target), data, make_config(negatives=n))(0, 0, [0, 1, 2])[0]
        for n in (None, target.vocab_size - len(data.distinct_tokens()) - 1, 60)
    )
    assert all_but_one == pytest.approx(whole, rel=0.02)
    assert few != whole
    assert few == pytest.approx(whole, rel=0.3)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_arithmetic_leaves_weights_and_gradients_in_float32(
    target: Target,
    data: CapturedSequences,
    make_config: Callable[..., TrainConfig],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    seen: list[torch.dtype] = []
    forward = functional.linear
    monkeypatch.setattr(functional, "linear", lambda x, *rest: seen.append((y := forward(x, *rest)).dtype) or y)
    heads = {precision: new_head(target, kind) for precision in ("float32", "bfloat16")}
    losses = {}
    for precision, head in heads.items():
        seen.clear()
        losses[precision] = GradientStep(target, head, data, make_config(precision=precision))(0, 0, [0, 1, 2])[0]
        assert set(seen) == {getattr(torch, precision)}
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.02)
    assert losses["bfloat16"] != losses["float32"]
    for exact, rounded in zip(*(gradients(head) for head in heads.values()), strict=True):
        assert rounded.dtype == torch.float32
        assert torch.cosine_similarity(exact.flatten(), rounded.flatten(), 0) > 0.98


def test_shares_are_disjoint_whole_and_balanced() -> None:
    counts = [8, 8, 8, 1, 1, 2, 4, 8]
    shares = share_out(range(8), counts, 3)
    assert sorted(s for share in shares for s in share) == list(range(8))
    assert sorted(sum(counts[s] for s in share) for share in shares) == [12, 12, 16]
    assert share_out([5], counts, 3) == [[5], [], []]
    assert share_out([5, 2, 0], counts, 1) == [[5, 2, 0]]
