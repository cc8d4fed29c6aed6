"""Linear layers on a CPU with their weights laid out once for oneDNN.

A plain product of a few rows with a weight lays the weight out anew at every call, which costs more than the product
itself; with a weight laid out beforehand sixteen rows take little longer than one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Rows the layout is chosen for: about those of a verify forward.
_ROWS = 16


class _PackedForward:
    """Replaces a layer's `forward`. Packs at the first call and again when the weight is seen to have changed."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer
        self._version: tuple[int, int] | None = None
        self._packed: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        layer = self._layer
        weight = layer.weight
        if not can_pack(weight) or (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)):
            return F.linear(x, weight, layer.bias)
        version = (weight.data_ptr(), weight._version)
        if version != self._version:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
            self._version = version
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, layer.bias, "none", [], "")


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN takes this weight: on the CPU, of a number type the CPU multiplies natively."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def pack_linears(model: nn.Module) -> None:
    """Make every linear layer of `model` run from a packed copy of its weight, where the CPU gains by it.

    Outputs may differ from the plain layer's in the last bits. The weights themselves stay where they are, for tied
    embeddings, checkpoints and training; the copies double the memory they take. Call it again when an optimizer has
    changed the weights: fused ones do so without leaving a trace.
    """
    for layer in model.modules():
        if type(layer) is not nn.Linear or not can_pack(layer.weight):
            continue
        if layer.weight.requires_grad or not isinstance(layer.forward, _PackedForward):
            layer.forward = _PackedForward(layer)  # type: ignore[assignment]
