"""The format that draft heads are published in: reading the `config.json` of a head, and writing it.

A published config is a Qwen3 configuration with `block_size`, `num_target_layers` and `dflash_config` added. A field
that is missing is an error, never a guess; a field that may stand in several places must say the same in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jetspec.errors import JetSpecError
from jetspec.head.rope import SHARED_FIELDS

#: What `architectures` says of each kind of head.
ARCHITECTURES = {"parallel": "DFlashDraftModel", "autoregressive": "AutoregressiveDraftModel"}
#: Where a config may say whether the head's block is causal.
CAUSAL_FLAGS = ("dflash_config.causal_head", "dflash_config.causal", "is_causal")
LAYER_TYPES = ("full_attention", "sliding_attention")
#: Fields that stand at the top level, under the same name as in `HeadConfig`, and must be given.
PLAIN_FIELDS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "num_target_layers",
    "rms_norm_eps",
)


def read_fields(data: Mapping[str, Any], causal: bool | None) -> dict[str, Any]:
    """The fields of a `HeadConfig` from a published config; their values are checked by `HeadConfig` itself.

    Args:
        data: the content of `config.json`.
        causal: whether the block is causal, for a config that does not say so. None: as the publisher's class has it.

    Raises:
        JetSpecError: a field is missing, or two fields contradict each other or `causal`.
    """
    _require_equal(data, "model_type", "qwen3")
    _require_equal(data, "hidden_act", "silu")
    kind = _read_kind(data)
    fields: dict[str, Any] = {name: _required(data, name) for name in PLAIN_FIELDS}
    mask_token = "dflash_config.mask_token_id"
    return fields | {
        "kind": kind,
        "rope_parameters": _read_rope(data),
        "block_size": _required(data, "block_size", "dflash_config.block_size"),
        "mask_token_id": _required(data, mask_token) if kind == "parallel" else _optional(data, None, mask_token),
        "target_layer_ids": _as_tuple(_required(data, "dflash_config.target_layer_ids")),
        "causal": _read_causal(data, kind, causal),
        "shifted": _optional(data, False, "dflash_config.shifted"),
        "attention_bias": _optional(data, False, "attention_bias"),
        "transition_size": _optional(data, 0, "dflash_config.transition_size"),
        **_read_windows(data, fields["num_hidden_layers"]),
    }


def causal_flag(data: Mapping[str, Any]) -> bool | None:
    """What a published config says about its block; None where it says nothing.

    Raises:
        JetSpecError: a flag is no boolean, or two of them disagree.
    """
    for path in CAUSAL_FLAGS:
        if (value := _lookup(data, path)) is not None:
            _require_bool(path, value)
    flag: bool | None = _optional(data, None, *CAUSAL_FLAGS)
    return flag


def _read_causal(data: Mapping[str, Any], kind: str, given: bool | None) -> bool:
    flag = causal_flag(data)
    if flag is None:
        # The class that DFlash heads are published with attends in both directions and writes no flag.
        return kind != "parallel" if given is None else given
    if given not in (None, flag):
        raise JetSpecError(
            f"causal={given}: the head's config says {flag} ({' / '.join(CAUSAL_FLAGS)}); leave causal out, or correct "
            "the config"
        )
    return flag


def _read_kind(data: Mapping[str, Any]) -> str:
    found = data.get("architectures")
    if found is None:
        return "parallel"
    for kind, architecture in ARCHITECTURES.items():
        if isinstance(found, list) and architecture in found:
            return kind
    raise JetSpecError(f"architectures={found!r}: must name one of {', '.join(ARCHITECTURES.values())}")


def _read_rope(data: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters from `rope_parameters`, the older `rope_scaling`, and the fields of the top level."""
    places = [place for place in ("rope_parameters", "rope_scaling") if data.get(place) is not None]
    names = dict.fromkeys(SHARED_FIELDS)
    for place in places:
        if not isinstance(data[place], Mapping):
            raise JetSpecError(f"{place}={data[place]!r}: must be an object or null")
        names |= dict.fromkeys(data[place])
    found = {
        name: _optional(
            data, None, *(f"{place}.{name}" for place in places), *([name] if name in SHARED_FIELDS else [])
        )
        for name in names
        if name not in ("type", "rope_type")
    }
    kinds = [f"{place}.{name}" for place in places for name in ("rope_type", "type")]
    kind = _optional(data, "default", *kinds)
    if found["rope_theta"] is None:
        _required(data, "rope_parameters.rope_theta", "rope_theta")
    if kind == "default" and not any(_lookup(data, f"{place}.original_max_position_embeddings") for place in places):
        found.pop("original_max_position_embeddings", None)  # at the top level it is about scaled kinds alone
    return {"rope_type": kind, **{name: value for name, value in found.items() if value is not None}}


def _read_windows(data: Mapping[str, Any], num_layers: Any) -> dict[str, Any]:
    """`sliding_window` and `layer_types`, by the rules of a Qwen3 configuration."""
    uses_window = _optional(data, False, "use_sliding_window")
    _require_bool("use_sliding_window", uses_window)
    window = data.get("sliding_window") if uses_window else None
    kinds = data.get("layer_types")
    if kinds is not None or not isinstance(num_layers, int) or window is None:
        return {"sliding_window": window, "layer_types": () if kinds is None else _as_tuple(kinds)}
    first = _required(data, "max_window_layers")
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise JetSpecError(f"max_window_layers={first!r}: must be a whole number of at least 0")
    return {"sliding_window": window, "layer_types": tuple(LAYER_TYPES[layer >= first] for layer in range(num_layers))}


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _lookup(data: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, None where it is absent."""
    value: Any = data
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _optional(data: Mapping[str, Any], default: Any, *paths: str) -> Any:
    """The one value found at `paths`, or `default`; JetSpecError where two of them disagree."""
    found = {path: value for path in paths if (value := _lookup(data, path)) is not None}
    if not found:
        return default
    first, *rest = found.values()
    if any(other != first or isinstance(other, bool) != isinstance(first, bool) for other in rest):
        listing = ", ".join(f"{path} = {value!r}" for path, value in found.items())
        raise JetSpecError(f"the head's config contradicts itself: {listing}; make them agree")
    return first


def _required(data: Mapping[str, Any], *paths: str) -> Any:
    value = _optional(data, None, *paths)
    if value is None:
        raise JetSpecError(f"the head's config lacks {' or '.join(paths)}; add it, it is never guessed")
    return value


def _require_equal(data: Mapping[str, Any], name: str, wanted: str) -> None:
    if data.get(name, wanted) != wanted:
        raise JetSpecError(f"{name}={data[name]!r}: must be {wanted!r} for a draft head")


def _require_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise JetSpecError(f"{name}={value!r}: must be true or false")
