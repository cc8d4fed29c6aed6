"""The layouts of EAGLE-3 heads of the original repository and of SpecForge: reading `config.json`.

Both are a Llama configuration with `draft_vocab_size`. Source: SafeAILab/EAGLE, eagle/model/cnets.py and configs.py;
sgl-project/SpecForge, specforge/modeling/draft/llama3_eagle.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from jetspec.errors import JetSpecError
from jetspec.head.fields import as_tuple, optional, read_rope, refuse_unknown, require_bool, require_equal, required
from jetspec.head.options import Eagle3Config

#: What `architectures` says in each layout.
EAGLE, SPECFORGE = ("LlamaForCausalLM",), ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
#: Tokens that a draft reaches ahead where the config names no number. Source: SafeAILab/EAGLE, eagle/model/ea_model.py,
#: whose depth of 7 counts the levels behind the first.
DEPTH = 8
#: Fields that must be given, under the same name as in `HeadConfig`.
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "draft_vocab_size",
)
#: Fields that change nothing in what a head computes, or that these layouts' classes do not read.
IGNORED = (
    "architectures",
    "attention_dropout",
    "auto_map",
    "bias",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "layer_types",
    "max_window_layers",
    "model_type",
    "pad_token_id",
    "pretraining_tp",
    "sliding_window",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "use_sliding_window",
    "_name_or_path",
)
READ = (
    *SIZES,
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "attention_bias",
    "mlp_bias",
    "target_hidden_size",
    "fc_norm",
    "norm_output",
    "num_target_layers",
    "eagle_config",
)


def is_eagle3(data: Mapping[str, Any]) -> bool:
    """Whether a config says that it is one of an EAGLE-3 head in one of these layouts."""
    return any(name in (data.get("architectures") or ()) for name in (*EAGLE, *SPECFORGE))


def read_fields(data: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """The fields of a `HeadConfig` from the config of an EAGLE-3 head.

    Args:
        data: the content of `config.json`.
        tensors: the names of the head's tensors, which tell whether it has an embedding of its own.

    Raises:
        JetSpecError: a field is missing or unknown, or asks for something that these layouts' classes do not do.
    """
    if data.get("draft_vocab_size") is None:
        raise JetSpecError(
            "the head's config lacks draft_vocab_size, which every EAGLE-3 head has; EAGLE-1 and EAGLE-2 heads are not "
            "read"
        )
    refuse_unknown(data, {*READ, *IGNORED})
    for name, wanted in {"hidden_act": "silu", "mlp_bias": False, "num_hidden_layers": 1}.items():
        require_equal(data, name, wanted)
    # SpecForge's class leaves the final norm out with norm_output = false; with true it feeds back states before it.
    require_equal(data, "norm_output", True)
    fields: dict[str, Any] = {name: required(data, name) for name in SIZES}
    heads = fields["num_attention_heads"]
    return {
        **fields,
        "num_key_value_heads": optional(data, heads, "num_key_value_heads"),
        "head_dim": optional(data, head_dim(fields), "head_dim"),
        "kind": "eagle3",
        "causal": True,
        "block_size": 1 + DEPTH,
        "rope_parameters": read_rope({"rope_theta": 10000.0, **data}),
        "attention_bias": optional(data, False, "attention_bias"),
        "num_target_layers": optional(data, None, "num_target_layers"),
        "target_layer_ids": _read_layers(data),
        "own_embedding": "embed_tokens.weight" in tensors,
        "eagle3": Eagle3Config(aux_norm=_read_norm(data), target_hidden_size=data.get("target_hidden_size")),
    }


def head_dim(fields: Mapping[str, Any]) -> Any:
    """The width of an attention head where the config does not give it."""
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 else None


def _read_norm(data: Mapping[str, Any]) -> Literal["each", "none"]:
    value = optional(data, False, "fc_norm")
    require_bool("fc_norm", value)
    return "each" if value else "none"


def _read_layers(data: Mapping[str, Any]) -> Any:
    """The layers whose outputs the head reads; empty where the config leaves it to EAGLE-3's choice.

    Source: sgl-project/SpecForge, specforge/algorithms/model_providers.py (resolve_eagle_capture_layers).
    """
    options = data.get("eagle_config")
    if options is None:
        return ()
    if not isinstance(options, Mapping):
        raise JetSpecError(f"eagle_config={options!r}: must be an object")
    refuse_unknown(options, {"eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state"}, "eagle_config.")
    require_equal(options, "use_aux_hidden_state", True)
    return as_tuple(optional(data, (), "eagle_config.eagle_aux_hidden_state_layer_ids"))
