"""Parts of a draft head's configuration that only some published families have."""

from __future__ import annotations

from typing import Literal

from pydantic import FiniteFloat, model_validator
from typing_extensions import Self

from jetspec.config import Config, option
from jetspec.errors import JetSpecError


class Eagle3Config(Config):
    """What one EAGLE-3 head may do otherwise than another."""

    qk_norm: bool = option(False, help="Whether queries and keys are normalised.")
    norm_before_residual: bool = option(False, help="Whether the residual stream starts behind the feature's norm.")
    aux_norm: Literal["none", "each", "joint"] = option(
        "none", help="What is normalised before the aux hidden states are fused: nothing, each of them, or all as one."
    )
    norm_output: bool = option(False, help="Whether a drafted token's feature is taken behind the final norm.")
    target_hidden_size: int | None = option(None, help="Width of the target's hidden states; None: the head's.", ge=1)


class CorrectionConfig(Config):
    """How the candidates of a parallel head are scored anew for every path of a draft tree."""

    kind: Literal["domino", "markov", "selector"] = option(help="Domino, DSpark's Markov head, or DFlash 2's selector.")
    rank: int = option(help="Width of the product that corrects a candidate's logit.", ge=1)
    state_size: int = option(0, help="Width of Domino's recurrent state.", ge=0)
    skip: int = option(0, help="How many of the first drafted tokens Domino leaves uncorrected.", ge=0)
    form: Literal["vanilla", "gated", "rnn"] = option("vanilla", help="The form of the Markov head.")
    top_k: int = option(0, help="Candidates that the selector chooses among.", ge=0)

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        for name, kind in {"state_size": "domino", "top_k": "selector"}.items():
            if (getattr(self, name) > 0) != (self.kind == kind):
                raise JetSpecError(f"{name}={getattr(self, name)}: must be at least 1 for a {kind} head, 0 for others")
        return self


class DFlash2Config(Config):
    """Convolutions along the block around attention and MLP of a DFlash 2 head, and its scales."""

    kernel_size: int = option(help="Positions of the block that one output reads: its own and those before it.", ge=1)
    group_size: int = option(help="Channels that share the part of the kernel that depends on the input.", ge=1)
    embedding_scale: FiniteFloat = option(1.0, help="What the embeddings of a block are multiplied by.", gt=0)
    logit_scale: FiniteFloat = option(1.0, help="What the logits are multiplied by.", gt=0)
    logit_softcap: FiniteFloat | None = option(None, help="The bound of the logits behind the scale.", gt=0)
