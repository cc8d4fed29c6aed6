"""Fields of a transformers config under whichever name a model family gives them."""

from __future__ import annotations

from typing import Any, Literal

from jetspec.errors import JetSpecError

#: Names of one field across model families, in the order in which they are looked for.
SPELLINGS: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads"),
    "head_dim": ("head_dim", "attention_head_dim"),
    "intermediate_size": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff"),
    "rms_norm_eps": (
        "rms_norm_eps",
        "layer_norm_eps",
        "layer_norm_epsilon",
        "layernorm_epsilon",
        "norm_eps",
        "norm_epsilon",
    ),
    "rope_parameters": ("rope_parameters",),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"),
}


def config_field(config: Any, name: str, kind: Literal["count", "number", "mapping"], default: Any = None) -> Any:
    """The value of one field of a target's config.

    Args:
        config: the config of the text model.
        name: a key of `SPELLINGS`.
        kind: what the value must be: a whole number of at least 1, a number above 0, or a mapping.
        default: the value where the config has the field under no name, or as None.

    Raises:
        JetSpecError: there is no value and no default, or the value is not of this kind. The message names the model
            family, the field and the fix.
    """
    family = getattr(config, "model_type", "") or type(config).__name__
    for spelling in SPELLINGS[name]:
        value = _value(config, spelling)
        if value is None:
            continue
        if _is_a(value, kind):
            return value
        wanted = {"count": "one whole number of at least 1", "number": "a number above 0", "mapping": "a mapping"}[kind]
        raise JetSpecError(
            f"the config of this {family} model has {spelling}={value!r:.80}: must be {wanted}; set it in the "
            "target's config.json, or use a target of another family"
        )
    if default is None:
        raise JetSpecError(
            f"the config of this {family} model has no {name} (looked for as {', '.join(SPELLINGS[name])}): set it in "
            "the target's config.json, or use a target of another family"
        )
    return default


def _value(config: Any, name: str) -> Any:
    """A field, or where its layers differ in it, the value of the most of them (the first one of equals)."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers' answer where the layers differ
        values = [getattr(layer, name) for layer in config.per_layer_config]
        return max(values, key=values.count)


def _is_a(value: Any, kind: Literal["count", "number", "mapping"]) -> bool:
    if kind == "mapping":
        return isinstance(value, dict)
    allowed = int if kind == "count" else (int, float)
    return isinstance(value, allowed) and not isinstance(value, bool) and value > 0
