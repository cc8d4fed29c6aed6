"""Reading the fields of a head's `config.json`.

A field that is missing is an error, never a guess; a field that may stand in several places must say the same in all of
them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from jetspec.errors import JetSpecError
from jetspec.head.rope import SHARED_FIELDS

LAYER_TYPES = ("full_attention", "sliding_attention")


def read_rope(data: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters from `rope_parameters`, the older `rope_scaling`, and the fields of the top level."""
    places = [place for place in ("rope_parameters", "rope_scaling") if data.get(place) is not None]
    names = dict.fromkeys(SHARED_FIELDS)
    for place in places:
        if not isinstance(data[place], Mapping):
            raise JetSpecError(f"{place}={data[place]!r}: must be an object or null")
        names |= dict.fromkeys(data[place])
    found = {
        name: optional(data, None, *(f"{place}.{name}" for place in places), *([name] if name in SHARED_FIELDS else []))
        for name in names
        if name not in ("type", "rope_type")
    }
    kinds = [f"{place}.{name}" for place in places for name in ("rope_type", "type")]
    kind = optional(data, "default", *kinds)
    if found["rope_theta"] is None:
        required(data, "rope_parameters.rope_theta", "rope_theta")
    if kind == "default" and not any(lookup(data, f"{place}.original_max_position_embeddings") for place in places):
        found.pop("original_max_position_embeddings", None)  # at the top level it is about scaled kinds alone
    return {"rope_type": kind, **{name: value for name, value in found.items() if value is not None}}


def read_windows(data: Mapping[str, Any], num_layers: Any) -> dict[str, Any]:
    """`sliding_window` and `layer_types`, by the rules of a Qwen3 configuration."""
    uses_window = optional(data, False, "use_sliding_window")
    require_bool("use_sliding_window", uses_window)
    window = data.get("sliding_window") if uses_window else None
    kinds = data.get("layer_types")
    if kinds is not None or not isinstance(num_layers, int) or window is None:
        return {"sliding_window": window, "layer_types": () if kinds is None else as_tuple(kinds)}
    first = required(data, "max_window_layers")
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise JetSpecError(f"max_window_layers={first!r}: must be a whole number of at least 0")
    return {"sliding_window": window, "layer_types": tuple(LAYER_TYPES[layer >= first] for layer in range(num_layers))}


def as_tuple(value: Any) -> Any:
    """A list as a tuple, anything else as it is."""
    return tuple(value) if isinstance(value, list) else value


def lookup(data: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, None where it is absent."""
    value: Any = data
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def optional(data: Mapping[str, Any], default: Any, *paths: str) -> Any:
    """The one value found at `paths`, or `default`; JetSpecError where two of them disagree."""
    found = {path: value for path in paths if (value := lookup(data, path)) is not None}
    if not found:
        return default
    first, *rest = found.values()
    if any(other != first or isinstance(other, bool) != isinstance(first, bool) for other in rest):
        listing = ", ".join(f"{path} = {value!r}" for path, value in found.items())
        raise JetSpecError(f"the head's config contradicts itself: {listing}; make them agree")
    return first


def required(data: Mapping[str, Any], *paths: str) -> Any:
    """The one value found at `paths`; JetSpecError where there is none, or two of them disagree."""
    value = optional(data, None, *paths)
    if value is None:
        raise JetSpecError(f"the head's config lacks {' or '.join(paths)}; add it, it is never guessed")
    return value


def require_equal(data: Mapping[str, Any], name: str, wanted: object) -> None:
    """JetSpecError where the field is given and is another than `wanted`."""
    if data.get(name, wanted) != wanted:
        raise JetSpecError(f"{name}={data[name]!r}: must be {wanted!r} for a draft head")


def require_bool(name: str, value: Any) -> None:
    """JetSpecError where the value is no boolean."""
    if not isinstance(value, bool):
        raise JetSpecError(f"{name}={value!r}: must be true or false")


def refuse_unknown(data: Mapping[str, Any], known: Collection[str], place: str = "") -> None:
    """JetSpecError where `data`, which stands behind the path `place`, has a field that is not known."""
    unknown = sorted(name for name, value in data.items() if name not in known and value is not None)
    if unknown:
        raise JetSpecError(
            f"{place}{unknown[0]}={data[unknown[0]]!r:.80}: is not a field that JetSpec knows, and may change what the "
            "head computes; remove it if it does not"
        )
