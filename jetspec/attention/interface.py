"""The bridge to transformers: an attention implementation that hands every layer's q, k, v to a row attention.

A model whose attention implementation is ROWS is called with the extra keyword ``row_attention``, a function
``(q, k, v, *, layer, scaling, window, softcap, sinks) -> output`` on flat rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from jetspec.attention.rows import Chunks, Window
from jetspec.errors import JetSpecError

ROWS = "jetspec_rows"
LAYER_TYPES = {
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "linear_attention",
    "conv",
    "hybrid",
    "mlp",
    "moe",
}

# Keywords that reach the attention function and say nothing about what it computes for flat rows.
WITHOUT_EFFECT = {
    "position_ids",
    "use_cache",
    "cache_position",
    "logits_to_keep",
    "is_causal",
    "dropout",
    "row_states",  # what recurrent layers take
}


class NotThroughRowsError(JetSpecError):
    """Attention was called without the keyword that `Target.forward` gives to the model."""


class LayerAttention(NamedTuple):
    """What one decoder layer asks of its attention, seen in a probe."""

    kv_heads: int
    head_dim: int
    value_dim: int
    window: Window


@torch.compiler.disable  # type: ignore[untyped-decorator]  # its batch changes with every forward, and there is nothing in it to fuse
def attention_over_rows(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    row_attention: Any = None,
    row_positions: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls in every layer: query [1, heads, rows, hd] -> ([1, rows, heads, hd], None).

    Raises JetSpecError, naming the keyword, for anything that would change the result and is not honoured.
    """
    name = type(module).__name__
    if row_attention is None:
        raise NotThroughRowsError(f"{name}: a model that a Target has taken over is called through Target.forward")
    if attention_mask is not None:
        raise JetSpecError(f"{name}: attention_mask is given; JetSpec's rows carry their own mask")
    if getattr(module, "is_cross_attention", False):
        raise JetSpecError(f"{name}: cross attention is not supported; use a decoder-only model")
    if not getattr(module, "is_causal", True) or others.get("is_causal") is False:
        raise JetSpecError(f"{name}: is_causal is False; JetSpec needs a causal model")
    if others.get("dropout"):
        raise JetSpecError(f"{name}: dropout is {others['dropout']}; put the model in eval mode")
    for keyword, given in others.items():
        if keyword not in WITHOUT_EFFECT and given is not None and given is not False:
            raise JetSpecError(f"{name}: the attention keyword {keyword!r} is not supported by JetSpec")
    if row_positions is not None:
        query = temperature_tuned(module, query, row_positions)
    output = row_attention(
        *(x[0].transpose(0, 1) for x in (query, key, value)),
        layer=module.layer_idx,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=chunks_of(module) if sliding_window is None else sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return output.unsqueeze(0), None


def chunks_of(module: nn.Module) -> Chunks | None:
    """The chunks of a layer that attends in chunks, which transformers would put into its mask."""
    config: Any = getattr(module, "config", None)
    size: int | None = getattr(config, "attention_chunk_size", None)
    layer_types = getattr(config, "layer_types", None) or []
    if size is None or not layer_types or layer_types[cast(int, module.layer_idx)] != "chunked_attention":
        return None
    return Chunks(size)


def temperature_tuned(module: Any, query: Tensor, positions: Tensor) -> Tensor:
    """Queries [1, heads, rows, hd] at the temperature of their positions [rows], in layers that tune it (Llama 4).

    transformers takes the place of a row among the rows for its position; that factor is taken out again.
    """
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return query

    def scale(positions: Tensor) -> Tensor:
        steps = torch.floor((positions.float() + 1) / float(module.floor_scale))
        return torch.log1p(steps) * float(module.attn_scale) + 1

    places = torch.arange(len(positions), device=positions.device)
    tuned: Tensor = query * (scale(positions) / scale(places))[:, None].to(query.dtype)
    return tuned


def no_mask(*args: Any, **kwargs: Any) -> None:
    """The mask transformers would build: none, rows carry their own."""


AttentionInterface.register(ROWS, attention_over_rows)
AttentionMaskInterface.register(ROWS, no_mask)


def use_row_attention(model: PreTrainedModel) -> None:
    """Switch a built model to row attention. Raises JetSpecError where its kind of attention is not supported."""
    config, name = model.config.get_text_config(decoder=True), type(model).__name__
    if model.config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise JetSpecError(f"{name} is an encoder-decoder model; use a decoder-only model")
    if getattr(config, "use_bidirectional_attention", None) or not getattr(config, "is_causal", True):
        raise JetSpecError(f"{name} attends in both directions; use a causal model")
    unknown = sorted(set(getattr(config, "layer_types", None) or []) - LAYER_TYPES)
    if unknown:
        raise JetSpecError(f"{name} has layer_types {unknown}; JetSpec supports {sorted(LAYER_TYPES)}")
    model.set_attn_implementation(ROWS)
    if config._attn_implementation != ROWS:
        raise JetSpecError(not_supported(model, "its attention cannot be replaced"))


@torch.inference_mode()
def probe_layers(model: PreTrainedModel, num_layers: int, **others: Any) -> list[LayerAttention | None]:
    """Run one token to see what each layer asks of its attention; None where a layer does not attend.

    `others` are keywords of the model's forward.

    Raises:
        JetSpecError: the model is not supported. A layer calls its attention twice or hides its sliding window, or the
            model does not let its attention be replaced.
    """
    seen: dict[int, LayerAttention] = {}

    def record(q: Tensor, k: Tensor, v: Tensor, *, layer: int, window: Window, **_: Any) -> Tensor:
        if layer in seen:
            raise JetSpecError(f"{type(model).__name__}: layer {layer} attends more than once; this is not supported")
        seen[layer] = LayerAttention(k.shape[1], k.shape[2], v.shape[2], window)
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)

    zero = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    try:
        model(input_ids=zero, position_ids=zero, use_cache=False, row_attention=record, **others)
    except NotThroughRowsError:
        raise JetSpecError(not_supported(model, "its attention cannot be replaced")) from None
    except JetSpecError:
        raise
    except Exception as error:  # the model's own code, with inputs that every supported family takes
        raise JetSpecError(not_supported(model, f"it cannot score one token: {error}")) from error
    layers = [seen.get(layer) for layer in range(num_layers)]
    check_windows(model, layers)
    return layers


def not_supported(model: PreTrainedModel, reason: str) -> str:
    """What to say of a model whose family cannot be a target."""
    family = model.config.get_text_config(decoder=True).model_type
    return (
        f"models of the family {family!r} ({type(model).__name__}) are not supported as a target: {reason}. Use a "
        "target of another family, for example Llama, Qwen, Gemma, Mistral or GPT-NeoX"
    )


def check_windows(model: PreTrainedModel, layers: list[LayerAttention | None]) -> None:
    """Raise JetSpecError where the config says a layer has a sliding window and its attention call does not."""
    layer_types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or []
    for index, (layer_type, layer) in enumerate(zip(layer_types, layers)):
        window = None if layer is None else layer.window
        if (layer_type in ("sliding_attention", "chunked_attention")) != (window is not None):
            raise JetSpecError(
                f"{type(model).__name__}: layer {index} is of type {layer_type!r} but its attention has "
                f"sliding_window={window}; this is not supported"
            )
