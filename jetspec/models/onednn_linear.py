"""Linear layers on a CPU with their weights laid out once for oneDNN.

A plain product of a few rows with a weight lays the weight out anew at every call, which costs more than the product
itself; with a weight laid out beforehand sixteen rows take little longer than one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

#: Rows the layout is chosen for: about those of a verify forward.
_ROWS = 16
#: Up to this many rows a bfloat16 product is faster than one in float32, whose weight is twice as long to read.
_FEW_ROWS = 2


class _PackedForward:
    """Replaces a layer's `forward`. Packs at the first call and again when the weight is seen to have changed."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer
        self._version: tuple[int, int] | None = None
        self._packed: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        layer = self._layer
        weight = layer.weight
        if torch.compiler.is_compiling():  # the packed product is opaque to a compiler
            return functional.linear(x, weight, layer.bias)
        dtype = packed_dtype(weight)
        if dtype is None or (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)):
            return functional.linear(x, weight, layer.bias)
        if weight.dtype == torch.bfloat16 != dtype and x.numel() <= _FEW_ROWS * x.shape[-1]:
            return functional.linear(x, weight, layer.bias)
        version = (weight.data_ptr(), weight._version)
        if version != self._version:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(dtype), _ROWS)
            self._version = version
        bias = None if layer.bias is None else layer.bias.to(dtype)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x.to(dtype), self._packed, bias, "none", [], "")
        return product.to(x.dtype)


def packed_dtype(weight: Tensor) -> torch.dtype | None:
    """The number type oneDNN multiplies this weight in; None where it is not oneDNN's business.

    bfloat16 stays so on CPUs with instructions for it. Elsewhere products of many rows in half types are multiplied in
    float32, which is several times faster than the plain layer, and the output is rounded once.
    """
    if type(weight) not in (Tensor, nn.Parameter):  # a quantized weight multiplies in its own way
        return None
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    if weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.bfloat16
    return torch.float32 if weight.dtype in (torch.float32, torch.bfloat16, torch.float16) else None


def pack_linears(model: nn.Module) -> None:
    """Make every linear layer of `model` run from a packed copy of its weight, where the CPU gains by it.

    Outputs may differ from the plain layer's in the last bits. The weights themselves stay where they are, for tied
    embeddings, checkpoints and training; the copies double the memory they take, and triple it where
    a half type is multiplied in float32. Call it again when an optimizer has changed the weights: fused
    ones do so without leaving a trace.
    """
    for layer in model.modules():
        if type(layer) is not nn.Linear or packed_dtype(layer.weight) is None:
            continue
        if layer.weight.requires_grad or not isinstance(layer.forward, _PackedForward):
            layer.forward = _PackedForward(layer)  # type: ignore[assignment]
