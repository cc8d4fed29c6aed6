"""The loss and its hand-made gradient against plain autograd over the whole vocabulary."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from jetspec.errors import JetSpecError
from jetspec.train import loss as loss_module
from jetspec.train.loss import OutputLayer, output_layer, row_losses, teach
from jetspec.train.step import reach
from tests.helpers.tiny import tiny_gemma2, tiny_target

VOCAB, HIDDEN = 90, 12


@dataclass
class Example:
    """An output layer as a model has it, and rows to be taught through it."""

    weight: Tensor
    bias: Tensor | None
    softcap: float | None
    hidden: Tensor
    labels: Tensor
    student: Tensor
    rows: Tensor

    @classmethod
    def random(cls, seed: int, *, bias: bool = False, softcap: float | None = None) -> Example:
        g = torch.Generator().manual_seed(seed)
        return cls(
            torch.randn(VOCAB, HIDDEN, generator=g),
            torch.randn(VOCAB, generator=g) if bias else None,
            softcap,
            torch.randn(20, HIDDEN, generator=g),
            torch.randint(VOCAB, (20,), generator=g),
            torch.randn(45, HIDDEN, generator=g),
            torch.randint(20, (45,), generator=g),
        )

    def layer(self, t: float = 1.0) -> OutputLayer:
        bias = None if self.bias is None else self.bias / t
        return OutputLayer(self.weight, bias, None if self.softcap is None else self.softcap / t, t)

    def losses(self, student: Tensor, t: float = 1.0, hard_labels: float = 0.0) -> tuple[Tensor, Tensor]:
        """In the words of a textbook, over the whole vocabulary."""
        taught = functional.linear(self.hidden, self.weight, self.bias)
        if self.softcap is not None:
            taught = self.softcap * torch.tanh(taught / self.softcap)
        target = (taught / t).log_softmax(-1)[self.rows]
        drafted = (functional.linear(student, self.weight, self.bias) / t).log_softmax(-1)
        divergence = (target.exp() * (target - drafted)).sum(-1)
        label = drafted.gather(1, self.labels[self.rows, None])[:, 0]
        return t**2 * ((1 - hard_labels) * divergence - hard_labels * label), label.exp()


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk_rows", [16, 1000])
@pytest.mark.parametrize(("t", "hard_labels"), [(1.0, 0.0), (2.5, 0.0), (1.0, 0.3), (0.7, 1.0)])
def test_loss_and_gradient_equal_autograd(
    monkeypatch: pytest.MonkeyPatch,
    bias: bool,
    softcap: float | None,
    chunk_rows: int,
    t: float,
    hard_labels: float,
) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", chunk_rows * 4 * VOCAB)
    example = Example.random(0, bias=bias, softcap=softcap)
    layer = example.layer(t)
    weights = torch.rand(45, generator=torch.Generator().manual_seed(1))
    ours, theirs = example.student.clone().requires_grad_(), example.student.clone().requires_grad_()
    losses, hits = row_losses(layer, ours, teach(layer, example.hidden, example.labels, hard_labels), example.rows)
    expected, probabilities = example.losses(theirs, t, hard_labels)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hits, probabilities, rtol=1e-5, atol=1e-6)
    (losses @ weights).backward()
    (expected @ weights).backward()
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_loss_is_zero_where_the_draft_equals_the_target() -> None:
    example = Example.random(1)
    layer, hidden = example.layer(), example.hidden
    losses, _ = row_losses(layer, hidden, teach(layer, hidden, example.labels), torch.arange(20))
    assert losses.abs().max() < 1e-4


def test_a_restricted_layer_estimates_the_whole_one() -> None:
    example = Example.random(2)
    example.weight[30:] = example.weight[30]  # the rare tokens are all alike, so any few stand for all
    example.labels %= 30
    layer = example.layer(1.5)
    ids = torch.cat((torch.arange(30).flip(0), torch.tensor([40, 70])))
    log_counts = torch.zeros(32)
    log_counts[30:] = math.log(60 / 2)
    whole, estimate = (
        row_losses(one, example.student, teach(one, example.hidden, example.labels, 0.2), example.rows)
        for one in (layer, layer.restrict(ids, log_counts))
    )
    torch.testing.assert_close(estimate, whole, rtol=1e-4, atol=1e-4)


def test_reach_is_the_probability_of_the_tokens_before() -> None:
    hits = torch.tensor([[0.5, 0.2, 0.9, 0.1], [1.0, 0.0, 1.0, 1.0]])
    expected = torch.tensor([[1.0, 0.5, 0.1, 0.09], [1.0, 1.0, 0.0, 0.0]])
    torch.testing.assert_close(reach(hits), expected)


def test_output_layer_of_a_target_with_capped_logits() -> None:
    target = tiny_target("llama")
    assert output_layer(target).softcap is None
    from jetspec.models.target import Target

    capped = Target.from_model(tiny_gemma2(final_logit_softcapping=1.5), name="capped")
    assert output_layer(capped).softcap == 1.5


def test_output_layer_refuses_other_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama")
    forward = target.forward

    def scaled(*args, **kwargs):
        out = forward(*args, **kwargs)
        return out._replace(logits=out.logits / 4)

    monkeypatch.setattr(target, "forward", scaled)
    with pytest.raises(JetSpecError, match="target: the logits of LlamaForCausalLM"):
        output_layer(target)
