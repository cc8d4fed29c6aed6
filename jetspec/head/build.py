"""Draft heads by kind, and a fresh one for a target: its sizes from the target, its weights random or copied."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from jetspec.errors import JetSpecError
from jetspec.head.autoregressive import AutoregressiveHead
from jetspec.head.base import DraftHead
from jetspec.head.config import HeadConfig
from jetspec.head.conv import ConvParallelHead
from jetspec.head.eagle3 import Eagle3Head
from jetspec.head.parallel import ParallelHead
from jetspec.head.rope import rope_like
from jetspec.head.transition import Transition
from jetspec.models.config_fields import config_field
from jetspec.models.layers import decoder_layers, decoder_of
from jetspec.models.target import Target, default_target_layer_ids

#: The class of each kind of head. A new kind has to be named in these places too: `kind` of `HeadConfig`;
#: `HEAD_DRAFTERS` in engine/drafters; the kinds of bench/methods.py; the readers beside layouts.py. A kind that can be
#: trained is also a `kind` of `head_for_target` and of `TrainConfig`.
HEADS: dict[str, type[DraftHead]] = {
    "parallel": ParallelHead,
    "autoregressive": AutoregressiveHead,
    "eagle3": Eagle3Head,
}


def new_head(config: HeadConfig) -> DraftHead:
    """A head of the kind that `config` names, its weights not set."""
    return (HEADS[config.kind] if config.dflash2 is None else ConvParallelHead)(config)


def head_for_target(
    target: Target,
    *,
    num_layers: int,
    block_size: int,
    kind: Literal["parallel", "autoregressive"] = "parallel",
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
    """Make a fresh head that fits `target`, on its device.

    Args:
        target: the model that the head will draft for; it decides the sizes.
        num_layers: decoder layers of the head.
        block_size: tokens of a block, anchor included.
        kind: "parallel", which needs a `mask_token_id`, or "autoregressive".
        mask_token_id: the token that fills a block behind its anchor.
        num_aux_layers: how many layers of the target to read, evenly spaced. Give this or `target_layer_ids`.
        target_layer_ids: the layers of the target to read, counted from 0.
        causal: whether a block position sees only those before it and itself.
        shifted: whether block position d predicts the token d + 1 places after the anchor, not d places.
        transition_size: width of the state that conditions a draft on its path; 0: none.
        init: "random" draws matrices from N(0, 0.02). "target" then copies, wherever name and shape agree, the weights
            of the target's last `num_layers` layers; the first layer reads the last of the aux hidden states.
        seed: seeds the random weights.
        dtype: number type of the head.

    Raises:
        JetSpecError: the options do not fit the target, or its config lacks a field that a head needs.
    """
    if init not in ("random", "target"):
        raise JetSpecError(f"init must be 'random' or 'target', got {init!r}")
    config = HeadConfig(
        **_sizes(target),
        num_hidden_layers=num_layers,
        block_size=block_size,
        kind=kind,
        mask_token_id=mask_token_id,
        target_layer_ids=_target_layer_ids(target, num_aux_layers, target_layer_ids),
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
    """Start `head` with the weights of `trained`.

    The block and vocabulary sizes may differ. `head` may have a transition where `trained` has none: its weights stay.

    Raises:
        JetSpecError: the two differ in anything else that changes what a weight means.
    """
    for name in HeadConfig.model_fields:
        ours, theirs = getattr(head.config, name), getattr(trained.config, name)
        free = name in ("block_size", "vocab_size") or (name == "transition_size" and not theirs)
        if ours != theirs and not free:
            raise JetSpecError(f"init: the trained head's {name} is {theirs!r}, the new one's {ours!r}")
    head.load_state_dict(trained.state_dict(), strict=False)


def _target_layer_ids(
    target: Target, num_aux_layers: int | None, target_layer_ids: Sequence[int] | None
) -> tuple[int, ...]:
    if target_layer_ids is not None and num_aux_layers is None:
        return tuple(target_layer_ids)
    if num_aux_layers is not None and target_layer_ids is None:
        return tuple(default_target_layer_ids(target.num_layers, num_aux_layers))
    raise JetSpecError("give either num_aux_layers or target_layer_ids")


def _sizes(target: Target) -> dict[str, Any]:
    """Fields of a head's configuration that follow the target; JetSpecError where its config lacks one of them."""
    field = partial(config_field, target.config)
    heads = field("num_attention_heads", "count")
    return {
        "hidden_size": target.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": field("num_key_value_heads", "count", heads),
        "head_dim": field("head_dim", "count", target.hidden_size // heads),
        "intermediate_size": field("intermediate_size", "count", 4 * target.hidden_size),
        "rms_norm_eps": field("rms_norm_eps", "number", 1e-6),
        "rope_parameters": rope_like(field("rope_parameters", "mapping", {})),
        "vocab_size": target.vocab_size,
        "max_position_embeddings": field("max_position_embeddings", "count"),
        "num_target_layers": target.num_layers,
    }


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
    decoder: Any = decoder_of(target.model, target.num_layers)
    count = len(head.layers)
    if count > target.num_layers:
        raise JetSpecError(f"num_layers is {count}, but init='target' has only {target.num_layers} layers to copy")
    sources = list(decoder_layers(decoder, target.num_layers))[-count:]
    if hasattr(sources[0], "pre_feedforward_layernorm") or not hasattr(sources[0], "input_layernorm"):
        raise JetSpecError(
            f"init='target' needs pre-norm layers like Llama's or Qwen3's; {type(sources[0]).__name__} "
            "places its norms elsewhere: use init='random'"
        )
    for norm in (getattr(decoder, "norm", None), sources[0].input_layernorm):
        if not _is_rms_norm(cast("nn.Module | None", norm)):
            raise JetSpecError(
                f"init='target' needs RMS norms with a weight and no bias; {type(decoder).__name__} has other ones: "
                "use init='random'"
            )
    for layer, source in zip(head.layers, sources, strict=True):
        _copy_layer(layer, source)
    _copy_if_equal_shape(head.norm.weight, _norm_scale(decoder.norm))
    input_scales = torch.stack([_norm_scale(cast(Any, source).input_layernorm) for source in sources])
    head.hidden_norm.weight.copy_(input_scales.mean(0))
    head.read_last_aux_hidden_state()


def _copy_layer(layer: nn.Module, source: Any) -> None:
    modules: dict[str, Any] = dict(source.named_modules())
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


def _is_rms_norm(norm: nn.Module | None) -> bool:
    """Whether a norm divides by the root mean square and multiplies by a weight, and does nothing else."""
    if norm is None or getattr(norm, "weight", None) is None or getattr(norm, "bias", None) is not None:
        return False
    return bool(_norm_scale(norm).any())  # equal entries are all zero behind a norm that subtracts their mean


def _norm_scale(norm: nn.Module) -> Tensor:
    """What a norm multiplies by, measured: some families store the scale itself, some the scale minus one."""
    weight = norm.weight
    assert isinstance(weight, Tensor)
    # Entries of one large size have that size as their root mean square, so eps drops out and the scale remains.
    scale: Tensor = norm(torch.full_like(weight, 1024.0)).float().cpu()
    return scale
