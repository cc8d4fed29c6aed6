"""Packed linear layers compute what plain ones do, also after their weights have changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from jetspec.models.onednn_linear import pack_linears


def build(bias: bool = True) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(24, 40, bias=bias), nn.SiLU(), nn.Linear(40, 8, bias=bias))
    packed = nn.Sequential(nn.Linear(24, 40, bias=bias), nn.SiLU(), nn.Linear(40, 8, bias=bias))
    packed.load_state_dict(plain.state_dict())
    pack_linears(packed)
    return plain, packed


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 24), (7, 24), (3, 5, 24), (300, 24), (0, 24)])
def test_equals_plain_layers(shape: tuple[int, ...], bias: bool) -> None:
    plain, packed = build(bias)
    x = torch.randn(shape)
    with torch.inference_mode():
        torch.testing.assert_close(packed(x), plain(x))
    assert packed.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types_are_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(300, 40).to(dtype)
    x = torch.randn(7, 300).to(dtype)
    expected = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double()).to(dtype)
    pack_linears(layer)
    with torch.inference_mode():
        output = layer(x)
    assert output.dtype == dtype
    assert (output != expected).float().mean() < 0.01  # a sum in float32 rarely rounds to the other side


def test_changed_weights_are_packed_again() -> None:
    plain, packed = build()
    x = torch.randn(4, 24)
    with torch.no_grad():
        packed(x)
        for model in (plain, packed):
            model[0].weight.mul_(2)
        torch.testing.assert_close(packed(x), plain(x))
        for model in (plain, packed):
            model.to(torch.float64).to(torch.float32)[2].weight.data = torch.ones(8, 40)
        torch.testing.assert_close(packed(x), plain(x))


def test_packing_again_after_an_optimizer_step() -> None:
    plain, packed = build()
    x = torch.randn(4, 24)
    for model in (plain, packed):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        with torch.inference_mode():
            model(x)
        model(x).square().sum().backward()
        optimizer.step()
    pack_linears(packed)
    with torch.inference_mode():
        torch.testing.assert_close(packed(x), plain(x), rtol=1e-4, atol=1e-4)


def test_frozen_weights_are_packed_once() -> None:
    _, packed = build()
    packed.requires_grad_(False)
    forward = packed[0].forward
    pack_linears(packed)
    assert packed[0].forward is forward


def test_gradients_are_those_of_plain_layers() -> None:
    plain, packed = build()
    x = torch.randn(4, 24)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for model, leaf in zip((plain, packed), inputs, strict=True):
        model(leaf).square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    torch.testing.assert_close(plain[0].weight.grad, packed[0].weight.grad)
