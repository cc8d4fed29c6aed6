"""The configuration of a draft head, in the format heads are published in.

A published `config.json` is a Qwen3 configuration plus `block_size`, `num_target_layers` and `dflash_config`.
Everything that changes what the head computes is checked here, once; a missing field is an error, never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from jetspec.errors import JetSpecError

if TYPE_CHECKING:
    from jetspec.models.target import Target

#: What `architectures` says of each kind of head.
ARCHITECTURES = {"parallel": "DFlashDraftModel", "autoregressive": "AutoregressiveDraftModel"}
CAUSAL_FLAGS = ("dflash_config.causal_head", "dflash_config.causal", "is_causal")
STATIC_ROPE_TYPES = ("default", "linear", "yarn", "llama3")
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Sizes and meaning of a draft head.

    `kind` is the kind of head, one of `ARCHITECTURES`. `mask_token_id`, `causal`, `shifted` and `transition_size` are
    a parallel head's; an autoregressive one has no mask token, is causal, not shifted and without transition.
    `block_size` counts the tokens of a block, anchor included. `target_layer_ids` are 0-based decoder layers of the
    target, in the order in which their outputs are concatenated. `shifted=False`: block position d predicts the
    token d places after the anchor; `shifted=True`: it predicts the token d + 1 places after the anchor.
    `rope_parameters` always holds `rope_type` and `rope_theta`. `windows[i]` is layer i's sliding window, or None.
    `transition_size` is the width of the state that conditions a draft on its path; 0: no `Transition`, as in published
    heads.

    Raises JetSpecError, naming the field, where a value is out of range or two fields disagree.
    """

    kind: str = "parallel"
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_parameters: Mapping[str, Any]
    vocab_size: int
    max_position_embeddings: int
    block_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int | None = None
    causal: bool
    shifted: bool = False
    attention_bias: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()
    transition_size: int = 0

    def __post_init__(self) -> None:
        for name in _SIZES:
            _require_int(name, getattr(self, name), at_least=1)
        for name in ("causal", "shifted", "attention_bias"):
            _require_bool(name, getattr(self, name))
        _require_int("block_size", self.block_size, at_least=2)
        self._check_kind()
        _require_int("dflash_config.transition_size", self.transition_size, at_least=0)
        _require_number("rms_norm_eps", self.rms_norm_eps)
        if self.num_attention_heads % self.num_key_value_heads:
            raise JetSpecError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise JetSpecError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        object.__setattr__(self, "rope_parameters", _checked_rope(self.rope_parameters))
        object.__setattr__(
            self, "target_layer_ids", _checked_target_layer_ids(self.target_layer_ids, self.num_target_layers)
        )
        layer_types = tuple(self.layer_types) or ("full_attention",) * self.num_hidden_layers
        object.__setattr__(self, "layer_types", layer_types)
        self._check_windows()

    def _check_kind(self) -> None:
        if self.kind not in ARCHITECTURES:
            raise JetSpecError(f"kind={self.kind!r}: must be one of {', '.join(ARCHITECTURES)}")
        if self.kind == "parallel":
            _require_int("dflash_config.mask_token_id", self.mask_token_id, at_least=0)
            return
        fixed = {"mask_token_id": None, "causal": True, "shifted": False, "transition_size": 0}
        for name, value in fixed.items():
            found = getattr(self, name)
            if found != value:
                raise JetSpecError(f"{name} is {found!r}: is for a parallel head, an autoregressive one has {value}")

    def _check_windows(self) -> None:
        if len(self.layer_types) != self.num_hidden_layers:
            raise JetSpecError(
                f"layer_types names {len(self.layer_types)} layers, num_hidden_layers is {self.num_hidden_layers}"
            )
        for kind in self.layer_types:
            if kind not in LAYER_TYPES:
                raise JetSpecError(f"layer_types holds {kind!r}; a draft head supports {', '.join(LAYER_TYPES)}")
        if self.sliding_window is not None:
            _require_int("sliding_window", self.sliding_window, at_least=1)
        elif "sliding_attention" in self.layer_types:
            raise JetSpecError(
                "layer_types holds 'sliding_attention' but there is no window: set use_sliding_window to true and "
                "sliding_window to a number of tokens, or make every layer 'full_attention'"
            )

    @property
    def num_aux_layers(self) -> int:
        return len(self.target_layer_ids)

    @property
    def rope_theta(self) -> float:
        return float(self.rope_parameters["rope_theta"])

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer; None is full attention."""
        return tuple(self.sliding_window if kind == "sliding_attention" else None for kind in self.layer_types)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, causal: bool | None = None) -> HeadConfig:
        """Read a published `config.json`.

        `causal` answers for a checkpoint that carries no causality flag; it must not contradict one that does.
        Raises JetSpecError where a field is missing, has the wrong type, or is contradicted by another.
        """
        _require_equal(data, "model_type", "qwen3")
        _require_equal(data, "hidden_act", "silu")
        kind = _read_kind(data)
        plain = {name: _required(data, name) for name in (*_SIZES, "rms_norm_eps")}
        _require_int("num_hidden_layers", plain["num_hidden_layers"], at_least=1)
        return cls(
            **plain,
            rope_parameters=_read_rope(data),
            block_size=_required(data, "block_size", "dflash_config.block_size"),
            kind=kind,
            mask_token_id=_read_mask_token(data, kind),
            target_layer_ids=_required(data, "dflash_config.target_layer_ids"),
            causal=_read_causal(data, causal),
            shifted=_optional(data, False, "dflash_config.shifted"),
            attention_bias=_optional(data, False, "attention_bias"),
            transition_size=_optional(data, 0, "dflash_config.transition_size"),
            **_read_windows(data, plain["num_hidden_layers"]),
        )

    def to_dict(self) -> dict[str, Any]:
        """The published form. All three causality flags are written, so that every reader finds its own."""
        scaling = {key: value for key, value in self.rope_parameters.items() if key != "rope_theta"}
        plain = {name: getattr(self, name) for name in (*_SIZES, "rms_norm_eps", "attention_bias", "block_size")}
        return {
            "architectures": [ARCHITECTURES[self.kind]],
            "model_type": "qwen3",
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            **plain,
            "rope_theta": self.rope_theta,
            "rope_scaling": None if scaling["rope_type"] == "default" else scaling,
            "rope_parameters": dict(self.rope_parameters),
            "use_sliding_window": self.sliding_window is not None,
            "sliding_window": self.sliding_window,
            "max_window_layers": self.num_hidden_layers,
            "layer_types": list(self.layer_types),
            "is_causal": self.causal,
            "dflash_config": {
                **({} if self.mask_token_id is None else {"mask_token_id": self.mask_token_id}),
                "target_layer_ids": list(self.target_layer_ids),
                "causal_head": self.causal,
                "causal": self.causal,
                "shifted": self.shifted,
                **({"transition_size": self.transition_size} if self.transition_size else {}),
            },
        }

    def validate_for(self, target: Target) -> None:
        """Raise JetSpecError, naming the field and the fix, where this head cannot draft for `target`."""
        wanted = {
            "hidden_size": target.hidden_size,
            "num_target_layers": target.num_layers,
            "vocab_size": target.vocab_size,
        }
        for name, value in wanted.items():
            if getattr(self, name) != value:
                raise JetSpecError(
                    f"the draft head's {name} is {getattr(self, name)}, the target's is {value}: "
                    "use the head that was trained for this target, or train one with `jetspec train`"
                )
        rows = target.model.get_input_embeddings().weight.shape[0]
        if self.mask_token_id is not None and self.mask_token_id >= rows:
            raise JetSpecError(
                f"the draft head's dflash_config.mask_token_id is {self.mask_token_id}, but the target embeds only "
                f"{rows} tokens: use the head's own target with its embedding resized as it was in training"
            )


_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "num_target_layers",
)
assert set(_SIZES) <= {field.name for field in fields(HeadConfig)}


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
    if any(other != first or type(other) is not type(first) for other in rest):
        raise JetSpecError(f"the head's config contradicts itself: {_listing(found)}; make them agree")
    return first


def _required(data: Mapping[str, Any], *paths: str) -> Any:
    value = _optional(data, None, *paths)
    if value is None:
        raise JetSpecError(f"the head's config lacks {' or '.join(paths)}; add it, it is never guessed")
    return value


def _read_kind(data: Mapping[str, Any]) -> str:
    found = data.get("architectures")
    if found is None:
        return "parallel"
    for kind, architecture in ARCHITECTURES.items():
        if isinstance(found, list) and architecture in found:
            return kind
    raise JetSpecError(f"architectures is {found!r}; a draft head has one of {', '.join(ARCHITECTURES.values())}")


def _read_mask_token(data: Mapping[str, Any], kind: str) -> Any:
    path = "dflash_config.mask_token_id"
    return _required(data, path) if kind == "parallel" else _optional(data, None, path)


def _read_causal(data: Mapping[str, Any], override: bool | None) -> bool:
    for path in CAUSAL_FLAGS:
        if (value := _lookup(data, path)) is not None:
            _require_bool(path, value)
    flag = _optional(data, None, *CAUSAL_FLAGS)
    if flag is None and override is None:
        raise JetSpecError(
            f"the head's config does not say whether its block is causal: none of {', '.join(CAUSAL_FLAGS)} is set; "
            "set one, or pass causal=True (JetSpec) or causal=False (DFlash) explicitly"
        )
    if None not in (flag, override) and flag != override:
        raise JetSpecError(f"causal={override} was passed, but the head's config says {flag} ({CAUSAL_FLAGS[0]})")
    return flag if override is None else override


def _read_rope(data: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters from `rope_parameters`, or from the older `rope_theta` and `rope_scaling`."""
    theta = _required(data, "rope_parameters.rope_theta", "rope_theta")
    scaling = _lookup(data, "rope_parameters") or _lookup(data, "rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise JetSpecError(f"rope_scaling must be an object or null, got {scaling!r}")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    rest = {key: value for key, value in scaling.items() if key not in ("type", "rope_type", "rope_theta")}
    return {"rope_type": kind, "rope_theta": theta, **rest}


def _read_windows(data: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """`sliding_window` and `layer_types`, by the rules of a Qwen3 configuration."""
    uses_window = _optional(data, False, "use_sliding_window")
    _require_bool("use_sliding_window", uses_window)
    window = data.get("sliding_window") if uses_window else None
    kinds = data.get("layer_types")
    if kinds is not None and not isinstance(kinds, list):
        raise JetSpecError(f"layer_types must be a list, got {kinds!r}")
    if kinds is None:
        first = num_layers if window is None else _required(data, "max_window_layers")
        _require_int("max_window_layers", first, at_least=0)
        kinds = [LAYER_TYPES[layer >= first] for layer in range(num_layers)]
    return {"sliding_window": window, "layer_types": tuple(kinds)}


def _checked_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    kind, theta = rope.get("rope_type"), rope.get("rope_theta")
    if kind not in STATIC_ROPE_TYPES:
        raise JetSpecError(
            f"rope_type {kind!r} is not supported in a draft head (supported: {', '.join(STATIC_ROPE_TYPES)}): "
            "cached keys need angles that do not change as the sequence grows"
        )
    _require_number("rope_theta", theta)
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise JetSpecError("partial_rotary_factor must be 1: a draft head rotates the whole head_dim")
    return dict(rope)


def _checked_target_layer_ids(target_layer_ids: Sequence[int], num_target_layers: int) -> tuple[int, ...]:
    name = "dflash_config.target_layer_ids"
    if not isinstance(target_layer_ids, Sequence) or isinstance(target_layer_ids, str) or not target_layer_ids:
        raise JetSpecError(f"{name} must be a non-empty list of layer numbers, got {target_layer_ids!r}")
    for layer in target_layer_ids:
        _require_int(name, layer, at_least=0)
        if layer >= num_target_layers:
            raise JetSpecError(
                f"{name} holds layer {layer}, but num_target_layers is {num_target_layers}: "
                f"layers are numbered 0 to {num_target_layers - 1}"
            )
    if len(set(target_layer_ids)) != len(target_layer_ids):
        raise JetSpecError(f"{name} names a layer twice: {list(target_layer_ids)}")
    return tuple(target_layer_ids)


def _require_equal(data: Mapping[str, Any], name: str, wanted: str) -> None:
    if data.get(name, wanted) != wanted:
        raise JetSpecError(f"{name} is {data[name]!r}; a draft head has {wanted!r}")


def _require_int(name: str, value: Any, *, at_least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise JetSpecError(f"{name} must be a whole number of at least {at_least}, got {value!r}")


def _require_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise JetSpecError(f"{name} must be true or false, got {value!r}")


def _require_number(name: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise JetSpecError(f"{name} must be a positive number, got {value!r}")


def _listing(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{path} = {value!r}" for path, value in values.items())
