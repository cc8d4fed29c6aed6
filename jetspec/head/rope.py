"""Rotary parameters of a draft head: which kinds there are, and what each of them needs and may have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jetspec.errors import JetSpecError

_YARN_OPTIONS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
#: For each kind, the fields that it needs and those that it may have, beside rope_type and rope_theta. Angles of these
#: kinds do not change as a sequence grows, so cached keys stay right.
ROPE_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "yarn": (("factor",), ("original_max_position_embeddings", *_YARN_OPTIONS)),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ("original_max_position_embeddings",)),
}
#: Fields that a config may carry at its top level or among its rotary parameters.
SHARED_FIELDS = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")


def checked_rope(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary parameters without fields that are None.

    Raises:
        JetSpecError: the kind is unknown, or a field is missing, unknown or out of range.
    """
    given = {name: value for name, value in parameters.items() if value is not None}
    kind = given.get("rope_type")
    if not isinstance(kind, str) or kind not in ROPE_FIELDS:
        raise JetSpecError(
            f"rope_type={kind!r}: must be one of {', '.join(ROPE_FIELDS)}; a draft head caches keys, so their angles "
            "must not change as the sequence grows"
        )
    partial = given.pop("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise JetSpecError(f"partial_rotary_factor={partial!r}: must be 1; a draft head rotates the whole head_dim")
    needed, optional = ROPE_FIELDS[kind]
    for name in ("rope_theta", *needed):
        if name not in given:
            raise JetSpecError(f"{name}: is required by rope_type={kind!r}; add it to rope_parameters")
    for name, value in given.items():
        if name not in ("rope_type", "rope_theta", *needed, *optional):
            raise JetSpecError(f"rope_parameters.{name}: is not a field of rope_type={kind!r} in a draft head")
        _check_value(name, value)
    return given


def rope_like(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters for a new head from those of its target; plain ones of the same base where the kind is the target's.

    Args:
        parameters: the target's rotary parameters, or a mapping from each layer type to its own.
    """
    shared = parameters.get("full_attention") or parameters
    theta = shared.get("rope_theta") or 10000.0
    kind = shared.get("rope_type") or "default"
    needed, optional = ROPE_FIELDS.get(kind, ((), ()))
    kept = {name: shared[name] for name in (*needed, *optional) if shared.get(name) is not None}
    if kind not in ROPE_FIELDS or not set(needed) <= kept.keys():
        return {"rope_type": "default", "rope_theta": theta}
    return {"rope_type": kind, "rope_theta": theta, **kept}


def _check_value(name: str, value: Any) -> None:
    if name == "rope_type":
        return
    if name == "truncate":
        if not isinstance(value, bool):
            raise JetSpecError(f"{name}={value!r}: must be true or false")
        return
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else float("nan")
    if not (0 < number < float("inf") or (number == 0 and name.startswith("mscale"))):
        raise JetSpecError(f"{name}={value!r}: must be a positive number")
