"""Writing a head's configuration in speculators' layout."""

from __future__ import annotations

from typing import Any

from jetspec.errors import JetSpecError
from jetspec.head import speculators
from jetspec.head.config import HeadConfig

#: The release of speculators whose classes the layout follows.
VERSION = "0.6.0"


def speculators_config(config: HeadConfig, verifier: str | None, architectures: tuple[str, ...] = ()) -> dict[str, Any]:
    """The content of `config.json` in speculators' layout.

    Args:
        config: the head's.
        verifier: hub id or directory of the target, from which speculators takes what the head borrows; None: not said.
        architectures: the classes that the target's own configuration names.

    Raises:
        JetSpecError: the layout has no head of this kind.
    """
    kind = _kind(config)
    tokens = config.block_size - 1
    shared = {
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "architectures": [speculators.ARCHITECTURES[kind]],
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": tokens,
                    "accept_tolerance": 0.0,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"name_or_path": verifier, "architectures": list(architectures)},
        },
        "transformer_layer_config": _layer_config(config),
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "target_hidden_size": None if config.eagle3 is None else config.eagle3.target_hidden_size,
        "tie_word_embeddings": False,
    }
    return {**shared, **(_eagle3_fields if kind == "eagle3" else _dflash_fields)(config)}


def _kind(config: HeadConfig) -> str:
    """The name that speculators has for a kind of head. JetSpecError where it has none."""
    if config.kind == "eagle3":
        return "eagle3"
    reason = None
    if config.kind == "autoregressive":
        reason = "kind='autoregressive': speculators has EAGLE-3 heads, whose layer is another one"
    elif config.transition_size:
        reason = f"transition_size={config.transition_size}: no head of speculators has a transition; train with 0"
    elif config.causal and any(window is None for window in config.windows):
        reason = "causal=True: speculators' layers of full attention see the whole block; train a bidirectional head"
    elif config.shifted:
        reason = "shifted=True: speculators has no such blocks"
    elif config.correction is not None and config.correction.kind == "domino":
        reason = "a Domino head: speculators has no such correction"
    if reason is not None:
        raise JetSpecError(f"{reason}; the head cannot be written in speculators' layout")
    if config.dflash2 is not None:
        return "dflash2"
    return "dspark" if config.correction is not None else "dflash"


def _layer_config(config: HeadConfig) -> dict[str, Any]:
    """The decoder layer's configuration: Llama's, or Qwen3's where queries and keys are normalised."""
    qk_norm = config.eagle3 is None or config.eagle3.qk_norm
    if not qk_norm and config.sliding_window is not None:
        raise JetSpecError("sliding_window: a Llama layer in speculators' layout has none")
    windows = {
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "max_window_layers": config.num_hidden_layers,
        "layer_types": list(config.layer_types),
    }
    return {
        "model_type": "qwen3" if qk_norm else "llama",
        "hidden_act": "silu",
        **{name: getattr(config, name) for name in (*speculators.SIZES, "head_dim", "attention_bias")},
        "rope_parameters": dict(config.rope_parameters),
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        **(windows if qk_norm else {"mlp_bias": False}),
    }


def _hidden_state_numbers(config: HeadConfig) -> list[int] | None:
    """The layers that the head reads, counted as hidden states: 0 is the embedding's output."""
    return [layer + 1 for layer in config.target_layer_ids] or None


def _eagle3_fields(config: HeadConfig) -> dict[str, Any]:
    options = config.eagle3
    assert options is not None
    return {
        "eagle_aux_hidden_state_layer_ids": _hidden_state_numbers(config),
        "norm_before_residual": options.norm_before_residual,
        "norm_before_fc": options.aux_norm == "joint",
        "fc_norm": options.aux_norm == "each",
        "norm_output": options.norm_output,
        "embed_requires_grad": False,
    }


def _dflash_fields(config: HeadConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "block_size": config.block_rows,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": _hidden_state_numbers(config),
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": not config.causal,
    }
    correction, options = config.correction, config.dflash2
    if options is not None and correction is not None:
        fields |= {
            "conv_kernel_size": options.kernel_size,
            "conv_group_size": options.group_size,
            "selector_rank": correction.rank,
            "selector_top_k": correction.top_k,
            "input_embedding_scale": options.embedding_scale,
            "output_multiplier": options.logit_scale,
            "final_logit_softcapping": options.logit_softcap,
        }
    elif correction is not None:
        fields |= {
            "markov_rank": correction.rank,
            "markov_head_type": correction.form,
            "enable_confidence_head": False,
            "confidence_head_with_markov": False,
        }
    return fields
