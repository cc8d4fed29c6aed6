"""What a model does with its rows beside what JetSpec replaces: nothing may pass from one row to another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from jetspec.attention.interface import LayerAttention, not_supported
from jetspec.errors import JetSpecError
from jetspec.models.recurrent import ProbedStates


@torch.inference_mode()
def check_rows_apart(model: PreTrainedModel, layers: nn.ModuleList, attention: Sequence[LayerAttention | None]) -> None:
    """Run three rows that see themselves only, the middle one not finite: it must spoil no other row.

    A model whose layers all attend is not checked. Raises JetSpecError, naming the first layer in which a row reaches
    another by a way that JetSpec does not know, a recurrence of another kind, say.
    """
    if all(layer is not None for layer in attention):
        return
    spoiled: list[bool] = []

    def spoil(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return output.index_fill(1, torch.tensor([1], device=output.device), float("nan"))

    def look(_module: nn.Module, _args: Any, output: Any) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]
        spoiled.append(not bool(hidden[0, [0, 2]].isfinite().all()))

    def own_value(q: Tensor, _k: Tensor, v: Tensor, **_: Any) -> Tensor:
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)

    embedding = cast(nn.Module, cast(Any, model).get_input_embeddings())
    handles = [embedding.register_forward_hook(spoil), *(layer.register_forward_hook(look) for layer in layers)]
    ids = torch.zeros(1, 3, dtype=torch.int64, device=model.device)
    positions = torch.arange(3, device=model.device)[None]
    try:
        model(
            input_ids=ids, position_ids=positions, use_cache=False, row_attention=own_value, row_states=ProbedStates()
        )
    finally:
        for handle in handles:
            handle.remove()
    if True in spoiled:
        layer = spoiled.index(True)
        name = type(layers[layer]).__name__
        raise JetSpecError(
            not_supported(
                model,
                f"layer {layer} ({name}) reads earlier tokens in another way than by attention, a gated delta rule, "
                "Mamba-2 or a short convolution",
            )
        )
