"""Draft heads by kind, and a fresh one for a target: its sizes from the target, its weights random or copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Literal

import torch
from torch import Tensor, nn

from jetspec.errors import JetSpecError
from jetspec.head.autoregressive import AutoregressiveHead
from jetspec.head.base import DraftHead
from jetspec.head.config import STATIC_ROPE_TYPES, HeadConfig
from jetspec.head.parallel import ParallelHead
from jetspec.head.transition import Transition
from jetspec.models.target import Target, default_target_layer_ids

#: The class of each kind of head.
HEADS: dict[str, type[DraftHead]] = {"parallel": ParallelHead, "autoregressive": AutoregressiveHead}


def new_head(config: HeadConfig) -> DraftHead:
    """A head of the kind that `config` names, its weights not set."""
    return HEADS[config.kind](config)


def head_for_target(
    target: Target,
    *,
    num_layers: int,
    block_size: int,
    kind: str = "parallel",
    mask_token_id: int | None = None,
    num_aux_layers: int | None = None,
    target_layer_ids: Sequence[int] | None = None,
    causal: bool = True,
    shifted: bool = False,
    transition_size: int = 0,
    init: Literal["random", "target"] = "random",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> DraftHead:
    """A head that fits `target`, on its device.

    Give `target_layer_ids`, or `num_aux_layers` for evenly spaced ones. `init="random"` draws matrices from N(0, 0.02);
    `init="target"` then replaces them, wherever name and shape agree, by the weights of the target's last
    `num_layers` layers, and starts with layers that read the last tap. Raises JetSpecError where the options do not
    fit the target. `kind` is "parallel", which needs a `mask_token_id`, or "autoregressive".
    """
    if init not in ("random", "target"):
        raise JetSpecError(f"init must be 'random' or 'target', got {init!r}")
    config = HeadConfig(
        **_sizes(target),
        num_hidden_layers=num_layers,
        block_size=block_size,
        kind=kind,
        mask_token_id=mask_token_id,
        target_layer_ids=_taps(target, num_aux_layers, target_layer_ids),
        causal=causal,
        shifted=shifted,
        transition_size=transition_size,
    )
    config.validate_for(target)
    with torch.device("meta"):
        head = new_head(config)
    _init_random(head.to_empty(device="cpu"), seed)
    if init == "target":
        _init_from_target(head, target)
    return head.to(device=target.device, dtype=dtype)


@torch.no_grad()
def copy_weights(head: DraftHead, trained: DraftHead) -> None:
    """Start `head` as `trained`. Block size may differ, and `head` may have a transition, which stays fresh, where
    `trained` has none.

    Raises JetSpecError where the two differ in anything else that changes what a weight means.
    """
    for field in fields(HeadConfig):
        ours, theirs = getattr(head.config, field.name), getattr(trained.config, field.name)
        free = field.name == "block_size" or (field.name == "transition_size" and not theirs)
        if ours != theirs and not free:
            raise JetSpecError(f"init: the trained head's {field.name} is {theirs!r}, the new one's {ours!r}")
    head.load_state_dict(trained.state_dict(), strict=False)


def _taps(target: Target, num_aux_layers: int | None, target_layer_ids: Sequence[int] | None) -> tuple[int, ...]:
    if target_layer_ids is not None and num_aux_layers is None:
        return tuple(target_layer_ids)
    if num_aux_layers is not None and target_layer_ids is None:
        return tuple(default_target_layer_ids(target.num_layers, num_aux_layers))
    raise JetSpecError("give either num_aux_layers or target_layer_ids")


def _sizes(target: Target) -> dict[str, Any]:
    config = target.config
    return {
        "hidden_size": target.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "head_dim": getattr(config, "head_dim", None) or target.hidden_size // config.num_attention_heads,
        "intermediate_size": config.intermediate_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": _rope(config.rope_parameters),
        "vocab_size": target.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "num_target_layers": target.num_layers,
    }


def _rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """The target's rotary parameters; plain ones of the same base where a head cannot have the target's kind."""
    parameters = parameters.get("full_attention", parameters)
    kept = {key: value for key, value in parameters.items() if key != "partial_rotary_factor"}
    if kept.get("rope_type") in STATIC_ROPE_TYPES:
        return kept
    return {"rope_type": "default", "rope_theta": kept["rope_theta"]}


@torch.no_grad()
def _init_random(head: DraftHead, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for module in head.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(0.0, 0.02, generator=generator)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.RMSNorm):
            module.weight.fill_(1.0)
    for module in head.modules():
        if isinstance(module, Transition):
            module.initialize(generator)


@torch.no_grad()
def _init_from_target(head: DraftHead, target: Target) -> None:
    decoder = target.model.get_decoder()
    count = len(head.layers)
    if count > len(decoder.layers):
        raise JetSpecError(f"num_layers is {count}, but init='target' has only {len(decoder.layers)} layers to copy")
    sources = list(decoder.layers)[-count:]
    if hasattr(sources[0], "pre_feedforward_layernorm") or not hasattr(sources[0], "input_layernorm"):
        raise JetSpecError(
            f"init='target' needs pre-norm layers like Llama's or Qwen3's; {type(sources[0]).__name__} "
            "places its norms elsewhere: use init='random'"
        )
    for norm in (decoder.norm, sources[0].input_layernorm):
        if getattr(norm, "weight", None) is None or getattr(norm, "bias", None) is not None:
            raise JetSpecError(
                f"init='target' needs norms with a weight and no bias, unlike {type(norm).__name__}: use init='random'"
            )
    for layer, source in zip(head.layers, sources, strict=True):
        _copy_layer(layer, source)
    _copy_if_equal_shape(head.norm.weight, _norm_scale(decoder.norm))
    input_scales = torch.stack([_norm_scale(source.input_layernorm) for source in sources])
    head.hidden_norm.weight.copy_(input_scales.mean(0))
    head.read_last_aux_hidden_state()


def _copy_layer(layer: nn.Module, source: nn.Module) -> None:
    modules = dict(source.named_modules())
    for name, module in layer.named_modules():
        other = modules.get(name)
        if other is None:
            continue
        if isinstance(module, nn.RMSNorm):
            _copy_if_equal_shape(module.weight, _norm_scale(other))
        elif isinstance(module, nn.Linear) and isinstance(getattr(other, "weight", None), Tensor):
            _copy_if_equal_shape(module.weight, other.weight)


def _copy_if_equal_shape(weight: Tensor, source: Tensor) -> None:
    if weight.shape == source.shape:
        weight.copy_(source)


def _norm_scale(norm: nn.Module) -> Tensor:
    """What a norm multiplies by, measured: some families store the scale itself, some the scale minus one."""
    weight = norm.weight
    assert isinstance(weight, Tensor)
    # Entries of one large size have that size as their root mean square, so eps drops out and the scale remains.
    return norm(torch.full_like(weight, 1024.0)).float().cpu()
