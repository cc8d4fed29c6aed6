"""The loss and its hand-made gradient against plain autograd over the whole vocabulary."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from jetspec.errors import JetSpecError
from jetspec.train import loss as loss_module
from jetspec.train.loss import OutputLayer, output_layer, teach, weighted_kl
from tests.tiny import tiny_gemma2, tiny_target

VOCAB, HIDDEN = 90, 12


def random_layer(generator: torch.Generator, *, bias: bool, softcap: float | None) -> OutputLayer:
    weight = torch.randn(VOCAB, HIDDEN, generator=generator)
    return OutputLayer(weight, torch.randn(VOCAB, generator=generator) if bias else None, softcap)


def reference(layer: OutputLayer, student: Tensor, hidden: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    taught = functional.linear(hidden, layer.weight, layer.bias)
    if layer.softcap is not None:
        taught = layer.softcap * torch.tanh(taught / layer.softcap)
    drafted = functional.linear(student, layer.weight, layer.bias).log_softmax(-1)
    target = taught.log_softmax(-1)[rows]
    return (weights * (target.exp() * (target - drafted)).sum(-1)).sum()


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk_rows", [16, 1000])
def test_loss_and_gradient_equal_autograd(
    monkeypatch: pytest.MonkeyPatch, bias: bool, softcap: float | None, chunk_rows: int
) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", chunk_rows * 4 * VOCAB)
    generator = torch.Generator().manual_seed(0)
    layer = random_layer(generator, bias=bias, softcap=softcap)
    hidden = torch.randn(20, HIDDEN, generator=generator)
    rows = torch.randint(0, 20, (45,), generator=generator)
    weights = torch.rand(45, generator=generator) * (torch.arange(45) % 5 != 0)
    student = torch.randn(45, HIDDEN, generator=generator)
    ours, theirs = student.clone().requires_grad_(), student.clone().requires_grad_()
    loss = weighted_kl(layer, ours, teach(layer, hidden), rows, weights)
    expected = reference(layer, theirs, hidden, rows, weights)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    (3 * loss).backward()
    (3 * expected).backward()
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    assert bool((ours.grad[weights == 0] == 0).all())


def test_loss_is_zero_where_the_draft_equals_the_target() -> None:
    generator = torch.Generator().manual_seed(1)
    layer = random_layer(generator, bias=False, softcap=None)
    hidden = torch.randn(6, HIDDEN, generator=generator)
    loss = weighted_kl(layer, hidden, teach(layer, hidden), torch.arange(6), torch.ones(6))
    assert abs(float(loss)) < 1e-4


def test_a_restricted_layer_estimates_the_whole_one() -> None:
    generator = torch.Generator().manual_seed(2)
    layer = random_layer(generator, bias=False, softcap=None)
    layer.weight[30:] = layer.weight[30]  # the rare tokens are all alike, so any few stand for all
    hidden, student = torch.randn(2, 8, HIDDEN, generator=generator)
    whole = weighted_kl(layer, student, teach(layer, hidden), torch.arange(8), torch.ones(8))
    ids = torch.cat((torch.arange(30), torch.tensor([40, 70])))
    log_counts = torch.zeros(32)
    log_counts[30:] = math.log(60 / 2)
    part = layer.restrict(ids, log_counts)
    estimate = weighted_kl(part, student, teach(part, hidden), torch.arange(8), torch.ones(8))
    torch.testing.assert_close(estimate, whole, rtol=1e-4, atol=1e-4)


def test_output_layer_of_a_target_with_capped_logits() -> None:
    target = tiny_target("llama")
    assert output_layer(target).softcap is None
    from jetspec.target import Target

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
