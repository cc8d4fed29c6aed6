"""The configuration of a draft head: everything that decides what the head computes, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, FiniteFloat, field_validator, model_validator
from typing_extensions import Self

from jetspec.config import Config, option
from jetspec.errors import JetSpecError
from jetspec.head.options import CorrectionConfig, DFlash2Config, Eagle3Config
from jetspec.head.published import ARCHITECTURES, PLAIN_FIELDS, read_fields, write_extra
from jetspec.head.rope import checked_rope

if TYPE_CHECKING:
    from jetspec.models.target import Target

#: Layers that an EAGLE-3 head reads where it names none.
EAGLE3_AUX_LAYERS = 3
#: What an autoregressive head has of the fields that only a parallel head may choose.
_AUTOREGRESSIVE = {
    "mask_token_id": None,
    "causal": True,
    "shifted": False,
    "sample_from_anchor": False,
    "transition_size": 0,
    "correction": None,
    "dflash2": None,
}


class HeadConfig(Config):
    """Sizes and meaning of a draft head.

    `mask_token_id`, `causal`, `shifted`, `sample_from_anchor`, `transition_size`, `correction` and `dflash2` are for a
    parallel head. An autoregressive or EAGLE-3 head has no mask token, is causal and is not shifted.

    Raises:
        JetSpecError: a value is out of range, or two fields disagree. The message names the field.
    """

    kind: Literal["parallel", "autoregressive", "eagle3"] = option("parallel", help="The kind of head.")
    hidden_size: int = option(help="Width of the head, and of the target's hidden states.", ge=1)
    num_hidden_layers: int = option(help="Decoder layers of the head.", ge=1)
    num_attention_heads: int = option(help="Query heads of a layer.", ge=1)
    num_key_value_heads: int = option(help="Key heads of a layer.", ge=1)
    head_dim: int = option(help="Width of one attention head.", ge=1)
    intermediate_size: int = option(help="Width of the MLP.", ge=1)
    rms_norm_eps: FiniteFloat = option(help="What the norms add to the mean square.", gt=0)
    rope_parameters: dict[str, Any] = option(help="Rotary parameters; always with rope_type and rope_theta.")
    vocab_size: int = option(help="Tokens that the head may propose: the ids below this number.", ge=1)
    max_position_embeddings: int = option(help="Tokens of the longest sequence.", ge=1)
    block_size: int = option(help="Tokens of a block, anchor included.", ge=2)
    num_target_layers: int | None = option(None, help="Decoder layers of the target; None: not known.", ge=1)
    target_layer_ids: tuple[Annotated[int, Field(ge=0)], ...] = option(
        help="Decoder layers of the target, counted from 0, in the order in which their outputs are concatenated. "
        "Empty in an EAGLE-3 head: three layers, chosen as EAGLE-3 does.",
    )
    mask_token_id: int | None = option(None, help="The token that fills a block behind its anchor.", ge=0)
    causal: bool = option(help="Whether a block position sees only those before it and itself.")
    shifted: bool = option(
        False, help="Block position d predicts the token d + 1 places after the anchor (False: d places)."
    )
    sample_from_anchor: bool = option(
        False, help="Every row of the block predicts, the anchor's the first token; there are block_size - 1 rows."
    )
    draft_vocab_size: int | None = option(None, help="Tokens of the head's own lm_head; None: the target's.", ge=1)
    own_embedding: bool = option(False, help="Whether the head embeds tokens itself, not through the target.")
    eagle3: Eagle3Config | None = option(None, help="Variants of an EAGLE-3 head.")
    correction: CorrectionConfig | None = option(None, help="How candidates are scored anew for every path.")
    dflash2: DFlash2Config | None = option(None, help="Convolutions and scales of a DFlash 2 head.")
    attention_bias: bool = option(False, help="Whether the projections of the attention have a bias.")
    sliding_window: int | None = option(None, help="Tokens that a layer with a sliding window sees.", ge=1)
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] = option(
        (), help="The attention of each layer; empty: full attention in all of them."
    )
    transition_size: int = option(
        0, help="Width of the state that conditions a draft on its path; 0: none, as in published heads.", ge=0
    )

    @field_validator("rope_parameters")
    @classmethod
    def _check_rope(cls, rope_parameters: dict[str, Any]) -> dict[str, Any]:
        return checked_rope(rope_parameters)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.kind == "parallel" and self.mask_token_id is None:
            raise JetSpecError("mask_token_id: is required for a parallel head (dflash_config.mask_token_id)")
        for name, value in _AUTOREGRESSIVE.items() if self.kind != "parallel" else ():
            if getattr(self, name) != value:
                raise JetSpecError(
                    f"{name}={getattr(self, name)!r}: is for a parallel head; an {self.kind} head has {value}"
                )
        if (self.eagle3 is not None) != (self.kind == "eagle3"):
            raise JetSpecError(f"eagle3={self.eagle3!r}: must be given for an EAGLE-3 head, and for no other kind")
        self._check_path_scores()
        self._check_vocabulary()
        if self.num_attention_heads % self.num_key_value_heads:
            raise JetSpecError(
                f"num_attention_heads={self.num_attention_heads}: must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise JetSpecError(f"head_dim={self.head_dim}: must be even for rotary positions")
        self._check_target_layer_ids()
        self._check_windows()
        return self

    def _check_path_scores(self) -> None:
        if self.correction is not None and self.transition_size:
            raise JetSpecError(f"transition_size={self.transition_size}: must be 0 for a head with a correction")
        if self.sample_from_anchor and (self.shifted or self.transition_size):
            raise JetSpecError(
                "sample_from_anchor=True: is not possible with shifted or transition_size; leave one out"
            )
        if self.dflash2 is not None and self.hidden_size % self.dflash2.group_size:
            raise JetSpecError(
                f"conv_group_size={self.dflash2.group_size}: must divide hidden_size ({self.hidden_size}) evenly"
            )

    def _check_vocabulary(self) -> None:
        size = self.draft_vocab_size
        if size is not None and size > self.vocab_size:
            raise JetSpecError(f"draft_vocab_size={size}: must be at most vocab_size ({self.vocab_size})")
        if size is not None and self.transition_size:
            raise JetSpecError(f"draft_vocab_size={size}: must be None for a head with a transition")
        if self.kind == "eagle3" and size is None:
            raise JetSpecError("draft_vocab_size: is required for an EAGLE-3 head, which has an lm_head of its own")
        if self.aux_hidden_size != self.hidden_size and not self.own_embedding:
            raise JetSpecError(
                f"target_hidden_size={self.aux_hidden_size}: differs from hidden_size ({self.hidden_size}), so the "
                "head needs an embedding of its own (embed_tokens.weight)"
            )

    def _check_target_layer_ids(self) -> None:
        layers, count = list(self.target_layer_ids), self.num_target_layers
        if not layers and self.kind != "eagle3":
            raise JetSpecError("target_layer_ids=[]: must hold at least 1")
        if count is not None and max(layers, default=0) >= count:
            raise JetSpecError(
                f"target_layer_ids={layers}: must lie in 0..{count - 1}, the layers of a target with "
                f"num_target_layers={count}"
            )
        if len(set(layers)) != len(layers):
            raise JetSpecError(f"target_layer_ids={layers}: must not name a layer twice")

    def _check_windows(self) -> None:
        if not self.layer_types:
            object.__setattr__(self, "layer_types", ("full_attention",) * self.num_hidden_layers)
        if len(self.layer_types) != self.num_hidden_layers:
            raise JetSpecError(
                f"layer_types: must name {self.num_hidden_layers} layers (num_hidden_layers), not "
                f"{len(self.layer_types)}"
            )
        if self.sliding_window is None and "sliding_attention" in self.layer_types:
            raise JetSpecError(
                "layer_types holds 'sliding_attention' but there is no window: set use_sliding_window to true and "
                "sliding_window to a number of tokens, or make every layer 'full_attention'"
            )

    @property
    def num_aux_layers(self) -> int:
        """Layers of the target whose outputs the head reads."""
        return len(self.target_layer_ids) or EAGLE3_AUX_LAYERS

    @property
    def aux_hidden_size(self) -> int:
        """Width of the target's hidden states."""
        own = None if self.eagle3 is None else self.eagle3.target_hidden_size
        return self.hidden_size if own is None else own

    @property
    def block_rows(self) -> int:
        """Rows of the block that one forward of a parallel head runs."""
        return self.block_size - self.sample_from_anchor

    @property
    def reduced_vocab(self) -> bool:
        """Whether the head proposes only some of the tokens, by its own numbering."""
        return self.draft_vocab_size not in (None, self.vocab_size)

    @property
    def family(self) -> str:
        """What heads of this kind are known as."""
        if self.kind == "eagle3":
            return "EAGLE-3"
        if self.correction is not None:
            return {"domino": "Domino", "markov": "DSpark", "selector": "DFlash 2"}[self.correction.kind]
        if self.sample_from_anchor:
            return "DSpark"
        return "autoregressive" if self.kind == "autoregressive" else ("JetSpec" if self.causal else "DFlash")

    def layer_ids(self, num_target_layers: int) -> tuple[int, ...]:
        """The layers that the head reads of a target with so many.

        Source of the choice where the head names none: SafeAILab/EAGLE, eagle/model/modeling_llama_kv.py, which reads
        the inputs of the layers 2, n // 2 and n - 3.
        """
        n = num_target_layers
        return self.target_layer_ids or (1, n // 2 - 1, n - 4)

    @property
    def rope_theta(self) -> float:
        """The base of the rotary frequencies."""
        return float(self.rope_parameters["rope_theta"])

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer; None is full attention."""
        return tuple(self.sliding_window if kind == "sliding_attention" else None for kind in self.layer_types)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, causal: bool | None = None) -> HeadConfig:
        """Read a `config.json` in the layout of DFlash heads.

        Args:
            data: its content.
            causal: whether the block is causal, for a config without a causal flag. With None the block of such a
                parallel head is bidirectional, as in the class that publishes it.

        Raises:
            JetSpecError: a field is missing, has the wrong type, or is contradicted by another or by `causal`.
        """
        return cls(**read_fields(data, causal))

    @property
    def has_dflash_layout(self) -> bool:
        """Whether `to_dict` can express this configuration."""
        own = self.kind == "eagle3" or self.draft_vocab_size is not None or self.own_embedding
        shifts = {"domino": (True, False), "markov": (True,), "selector": (False,), None: (True, False)}
        fits = self.sample_from_anchor in shifts[None if self.correction is None else self.correction.kind]
        return not own and fits and self.num_target_layers is not None

    def to_dict(self) -> dict[str, Any]:
        """The layout of DFlash heads. All three causal flags are written, so that every reader finds its own.

        Raises:
            JetSpecError: that layout cannot express this configuration.
        """
        if not self.has_dflash_layout:
            raise JetSpecError(f"the layout of DFlash heads cannot express this {self.family} head")
        scaling = {key: value for key, value in self.rope_parameters.items() if key != "rope_theta"}
        return {
            "architectures": [ARCHITECTURES.get(self.family, ARCHITECTURES["DFlash"])],
            "model_type": "qwen3",
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            **{name: getattr(self, name) for name in (*PLAIN_FIELDS, "attention_bias")},
            "block_size": self.block_rows,
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
                **write_extra(self.correction, self.dflash2, sample_from_anchor=self.sample_from_anchor),
            },
        }

    def validate_for(self, target: Target) -> None:
        """Check that a head of this configuration can draft for `target`.

        `vocab_size` may be below the target's, whose embedding may be padded: the head then proposes ids below its own
        `vocab_size` alone.

        Raises:
            JetSpecError: it cannot. The message names the field and the fix.
        """
        fix = "use the head that was trained for this target, or train one with `jetspec train`"
        width = "hidden_size" if self.aux_hidden_size == self.hidden_size else "target_hidden_size"
        for name, own, value in (
            (width, self.aux_hidden_size, target.hidden_size),
            ("num_target_layers", self.num_target_layers, target.num_layers),
        ):
            if own not in (None, value):
                raise JetSpecError(f"the draft head's {name} is {own}, the target's is {value}: {fix}")
        layers = self.layer_ids(target.num_layers)
        if not 0 <= min(layers) <= max(layers) < target.num_layers or len(set(layers)) != len(layers):
            raise JetSpecError(
                f"the draft head reads the layers {list(layers)} of its target, which must be distinct, but the target "
                f"has only {target.num_layers} layers: {fix}"
            )
        if self.vocab_size > target.vocab_size:
            raise JetSpecError(
                f"the draft head's vocab_size is {self.vocab_size}, the target's is only {target.vocab_size}: {fix}"
            )
        rows = target.num_embeddings
        looks_up = self.own_embedding or (self.correction is not None and self.correction.kind != "domino")
        if looks_up and self.vocab_size < rows:
            raise JetSpecError(
                f"the draft head knows only {self.vocab_size} tokens (vocab_size), the target embeds {rows}: {fix}"
            )
        if self.mask_token_id is not None and self.mask_token_id >= rows and not self.own_embedding:
            raise JetSpecError(
                f"the draft head's dflash_config.mask_token_id is {self.mask_token_id}, but the target embeds only "
                f"{rows} tokens: use the head's own target with its embedding resized as it was in training"
            )
