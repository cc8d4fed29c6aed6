"""The layout of speculators: reading the `config.json` of its EAGLE-3, DFlash, DSpark and DFlash 2 heads.

The decoder layer's configuration lies in `transformer_layer_config`, a Llama or Qwen3 configuration; what else there is
to know lies beside it. Source: vllm-project/speculators, src/speculators/config.py and
src/speculators/models/{eagle3,dflash,dspark,dflash2}/config.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from jetspec.errors import JetSpecError
from jetspec.head.fields import (
    LAYER_TYPES,
    lookup,
    optional,
    read_rope,
    read_windows,
    refuse_unknown,
    require_bool,
    require_equal,
    required,
)
from jetspec.head.options import CorrectionConfig, Eagle3Config
from jetspec.head.published import dflash2_fields
from jetspec.head.published_eagle3 import head_dim

LAYER = "transformer_layer_config"
#: The class of each kind of head that is read.
ARCHITECTURES = {
    "eagle3": "Eagle3DraftModel",
    "dflash": "DFlashDraftModel",
    "dspark": "DSparkDraftModel",
    "dflash2": "DFlash2DraftModel",
}
#: Fields of the layer's configuration that must be given, under the same name as in `HeadConfig`.
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
)
#: Fields beside the layer's configuration that every kind may have.
COMMON = (
    LAYER,
    "architectures",
    "auto_map",
    "draft_vocab_size",
    "dtype",
    "has_no_defaults_at_init",
    "model_type",
    "speculators_config",
    "speculators_model_type",
    "speculators_version",
    "target_hidden_size",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
)
EAGLE3 = (
    "eagle_aux_hidden_state_layer_ids",
    "embed_requires_grad",
    "fc_norm",
    "norm_before_fc",
    "norm_before_residual",
    "norm_output",
)
DFLASH = (
    "aux_hidden_state_layer_ids",
    "block_size",
    "mask_token_id",
    "sample_from_anchor",
    "sliding_window_non_causal",
)
EXTRA = {
    "eagle3": EAGLE3,
    "dflash": DFLASH,
    "dspark": (
        *DFLASH,
        "markov_rank",
        "markov_head_type",
        "enable_confidence_head",
        "confidence_head_with_markov",
    ),
    "dflash2": (
        *DFLASH,
        "conv_kernel_size",
        "conv_group_size",
        "selector_rank",
        "selector_top_k",
        "input_embedding_scale",
        "output_multiplier",
        "final_logit_softcapping",
        "draft_ffn_type",
        # These are about experts, which a dense head does not have.
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "moe_experts_implementation",
    ),
}
#: Fields that each of transformers' configurations has, and that say nothing about what a head computes.
NEUTRAL = {
    "chunk_size_feed_forward",
    "id2label",
    "is_encoder_decoder",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "return_dict",
    "_name_or_path",
}


def read_fields(data: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """The fields of a `HeadConfig` from the config of a head in speculators' layout.

    Args:
        data: the content of `config.json`.
        tensors: the names of the head's tensors, which tell whether it has an lm_head or an embedding of its own.

    Raises:
        JetSpecError: the head is of a kind that is not read, or a field is missing or unknown.
    """
    kind = data.get("speculators_model_type")
    if kind not in ARCHITECTURES:
        raise JetSpecError(f"speculators_model_type={kind!r}: must be one of {', '.join(ARCHITECTURES)}")
    refuse_unknown(data, {*COMMON, *EXTRA[kind], *NEUTRAL})
    layer = required(data, LAYER)
    if not isinstance(layer, Mapping):
        raise JetSpecError(f"{LAYER}={layer!r:.80}: must be an object")
    fields = _read_layer(data, layer)
    own_lm_head = "lm_head.weight" in tensors
    size = required(data, "draft_vocab_size")
    if size != fields["vocab_size"] and not own_lm_head:
        raise JetSpecError(f"draft_vocab_size={size!r}: a reduced vocabulary needs the tensor lm_head.weight")
    fields |= {
        "own_embedding": "embed_tokens.weight" in tensors,
        "draft_vocab_size": size if own_lm_head else None,
    }
    rest = _read_eagle3(data, layer) if kind == "eagle3" else _read_dflash(data, layer, fields)
    return {**fields, **rest}


def _read_layer(data: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that come from the layer's configuration."""
    for name, wanted in {"hidden_act": "silu", "mlp_bias": False}.items():
        if layer.get(name, wanted) != wanted:
            raise JetSpecError(f"{LAYER}.{name}={layer[name]!r}: must be {wanted!r} for a draft head")
    if layer.get("model_type", "qwen3") not in ("llama", "qwen3"):
        raise JetSpecError(f"{LAYER}.model_type={layer['model_type']!r}: must be 'llama' or 'qwen3'")
    fields: dict[str, Any] = {name: required(data, f"{LAYER}.{name}") for name in SIZES}
    try:
        rope, windows = read_rope(layer), read_windows(layer, fields["num_hidden_layers"])
    except JetSpecError as error:
        raise JetSpecError(f"{LAYER}: {error}") from None
    return {
        **fields,
        **windows,
        "head_dim": optional(data, head_dim(fields), f"{LAYER}.head_dim"),
        "rope_parameters": rope,
        "attention_bias": optional(data, False, f"{LAYER}.attention_bias"),
    }


def _read_eagle3(data: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """Source: vllm-project/speculators, src/speculators/models/eagle3/core.py and model_definitions.py."""
    flags = {}
    for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        flags[name] = optional(data, False, name)
        require_bool(name, flags[name])
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise JetSpecError("norm_before_fc and fc_norm are both true: only one of them may be")
    options = Eagle3Config(
        qk_norm=layer.get("model_type", "qwen3") == "qwen3",
        norm_before_residual=flags["norm_before_residual"],
        aux_norm="joint" if flags["norm_before_fc"] else "each" if flags["fc_norm"] else "none",
        norm_output=flags["norm_output"],
        target_hidden_size=data.get("target_hidden_size"),
    )
    tokens = required(data, "speculators_config.proposal_methods")
    tokens = tokens[0].get("speculative_tokens") if isinstance(tokens, list) and tokens else None
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise JetSpecError(
            f"speculators_config.proposal_methods.0.speculative_tokens={tokens!r}: must be a whole number of at least 1"
        )
    return {
        "kind": "eagle3",
        "causal": True,
        "block_size": 1 + tokens,
        "target_layer_ids": _outputs(data, "eagle_aux_hidden_state_layer_ids"),
        "eagle3": options,
    }


def _read_dflash(data: Mapping[str, Any], layer: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Source: vllm-project/speculators, src/speculators/models/dflash/core.py and dspark/core.py."""
    kind = data["speculators_model_type"]
    if layer.get("model_type", "qwen3") != "qwen3":
        raise JetSpecError(f"{LAYER}.model_type={layer['model_type']!r}: must be 'qwen3' for a {kind} head")
    if data.get("target_hidden_size") not in (None, fields["hidden_size"]):
        raise JetSpecError(f"target_hidden_size={data['target_hidden_size']!r}: must be the head's for a {kind} head")
    from_anchor = optional(data, kind == "dspark", "sample_from_anchor")
    require_bool("sample_from_anchor", from_anchor)
    size = required(data, "block_size")
    extra: dict[str, Any] = {}
    if kind == "dspark":
        rank = required(data, "markov_rank")
        form = optional(data, "vanilla", "markov_head_type")
        extra["correction"] = CorrectionConfig(kind="markov", rank=rank, form=form) if rank != 0 else None
    elif kind == "dflash2":
        require_equal(data, "draft_ffn_type", "dense")
        require_equal(data, "sample_from_anchor", False)
        extra = dflash2_fields(data, "")
    layers = _outputs(data, "aux_hidden_state_layer_ids")
    if not layers:
        raise JetSpecError("the head's config lacks aux_hidden_state_layer_ids; add it, it is never guessed")
    return {
        "kind": "parallel",
        "causal": _read_causal(data, kind, fields),
        "block_size": size + 1 if from_anchor and isinstance(size, int) else size,
        "sample_from_anchor": from_anchor,
        "mask_token_id": required(data, "mask_token_id"),
        "target_layer_ids": layers,
        **extra,
    }


def _read_causal(data: Mapping[str, Any], kind: str, fields: Mapping[str, Any]) -> bool:
    """Layers of full attention see the whole block; those with a window only with `sliding_window_non_causal`."""
    both_ways = optional(data, kind == "dflash2", "sliding_window_non_causal")
    require_bool("sliding_window_non_causal", both_ways)
    kinds = set(fields["layer_types"])
    if both_ways or LAYER_TYPES[1] not in kinds:
        return False
    if kinds != {LAYER_TYPES[1]}:
        raise JetSpecError(
            f"sliding_window_non_causal=False: the layers with a window are then causal and the others are not "
            f"({LAYER}.layer_types), which JetSpec cannot draft with"
        )
    return True


def _outputs(data: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """The layers whose outputs the head reads, from numbers that count hidden states: 0 is the embedding's.

    Source: vllm-project/speculators, src/speculators/convert/dflash/converter.py (target_layer_ids plus 1), and
    vllm-project/vllm pull request 40727.
    """
    numbers = lookup(data, name)
    if numbers is None:
        return ()
    if not isinstance(numbers, list) or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in numbers):
        raise JetSpecError(f"{name}={numbers!r}: must be a list of whole numbers of at least 1; 0 is the embedding")
    return tuple(n - 1 for n in numbers)
