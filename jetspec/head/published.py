"""The layout of DFlash heads, which JetSpec, Domino, DSpark and DFlash 2 heads share: reading `config.json`.

A config is a Qwen3 configuration with `block_size`, `num_target_layers` and `dflash_config` added. A field that is
missing is an error, never a guess; a field that may stand in several places must say the same in all of them; an
unknown field of `dflash_config` is an error too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from jetspec.errors import JetSpecError
from jetspec.head.fields import (
    as_tuple,
    lookup,
    optional,
    read_rope,
    read_windows,
    refuse_unknown,
    require_bool,
    require_equal,
    required,
)
from jetspec.head.options import CorrectionConfig, DFlash2Config

#: What `architectures` says of each family.
ARCHITECTURES = {
    "DFlash": "DFlashDraftModel",
    "autoregressive": "AutoregressiveDraftModel",
    "Domino": "DominoDraftModel",
    "DSpark": "DSparkDraftModel",
    "DFlash 2": "DFlash2DraftModel",
    "DeepSpec": "Qwen3DSparkModel",
}
#: What `dflash_config.projector_type` says of a family.
PROJECTORS = {"domino": "Domino", "dspark": "DSpark"}
#: Fields of `dflash_config` that every family may have.
COMMON = ("mask_token_id", "target_layer_ids", "block_size", "causal_head", "causal", "shifted", "transition_size")
#: Fields of `dflash_config` that one family has beside these.
EXTRA = {
    "Domino": ("projector_type", "emb_dim", "gru_hidden_dim", "pure_draft_prefix_len", "shift_label"),
    "DSpark": (
        "projector_type",
        "attention_mode",
        "markov_rank",
        "markov_head_type",
        "enable_confidence_head",
        "confidence_head_alpha",
        "confidence_head_with_markov",
    ),
    "DFlash 2": (
        "conv_kernel_size",
        "conv_group_size",
        "selector_rank",
        "selector_top_k",
        "input_embedding_scale",
        "output_multiplier",
        "final_logit_softcapping",
    ),
}
#: Where a config may say whether the head's block is causal.
CAUSAL_FLAGS = ("dflash_config.causal_head", "dflash_config.causal", "is_causal")
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


def read_fields(data: Mapping[str, Any], causal: bool | None, tensors: Collection[str] = ()) -> dict[str, Any]:
    """The fields of a `HeadConfig` from a published config; their values are checked by `HeadConfig` itself.

    Args:
        data: the content of `config.json`.
        causal: whether the block is causal, for a config that does not say so. None: as the publisher's class has it.
        tensors: the names of the head's tensors, which tell whether it has an lm_head or an embedding of its own.

    Raises:
        JetSpecError: a field is missing or unknown, or two fields contradict each other or `causal`.

    Source: z-lab/dflash, dflash/model.py, and sgl-project/SpecForge, specforge/modeling/draft/dflash.py.
    """
    require_equal(data, "model_type", "qwen3")
    require_equal(data, "hidden_act", "silu")
    family = read_family(data)
    # DeepSpec writes at the top level what others write into dflash_config.
    place = "" if family == "DeepSpec" else "dflash_config."
    if place and isinstance(data.get("dflash_config"), Mapping):
        refuse_unknown(data["dflash_config"], {*COMMON, *EXTRA.get(family, ())}, "dflash_config.")
    kind = "autoregressive" if family == "autoregressive" else "parallel"
    fields: dict[str, Any] = {name: required(data, name) for name in PLAIN_FIELDS}
    mask_token = f"{place}mask_token_id"
    return {
        **fields,
        "kind": kind,
        "rope_parameters": read_rope(data),
        "block_size": required(data, "block_size", "dflash_config.block_size"),
        "mask_token_id": required(data, mask_token) if kind == "parallel" else optional(data, None, mask_token),
        "target_layer_ids": as_tuple(required(data, f"{place}target_layer_ids")),
        "causal": _read_causal(data, kind, causal),
        "shifted": optional(data, False, "dflash_config.shifted"),
        "attention_bias": optional(data, False, "attention_bias"),
        "transition_size": optional(data, 0, "dflash_config.transition_size"),
        **read_windows(data, fields["num_hidden_layers"]),
        **_read_extra(data, family, place, tensors),
    }


def read_family(data: Mapping[str, Any]) -> str:
    """The family that `architectures` and `dflash_config.projector_type` name.

    Raises:
        JetSpecError: they name no known family, or contradict each other.
    """
    found, projector = data.get("architectures"), lookup(data, "dflash_config.projector_type")
    if projector is not None and projector not in PROJECTORS:
        raise JetSpecError(f"dflash_config.projector_type={projector!r}: must be one of {', '.join(PROJECTORS)}")
    if found is None:
        return PROJECTORS.get(projector, "DFlash")
    for family, architecture in ARCHITECTURES.items():
        if isinstance(found, list) and architecture in found:
            named = PROJECTORS.get(projector, family)
            if named != family != "DFlash":
                raise JetSpecError(
                    f"the head's config contradicts itself: architectures = {found!r}, dflash_config.projector_type = "
                    f"{projector!r}; make them agree"
                )
            return named
    raise JetSpecError(f"architectures={found!r}: must name one of {', '.join(ARCHITECTURES.values())}")


def _read_extra(data: Mapping[str, Any], family: str, place: str, tensors: Collection[str]) -> dict[str, Any]:
    """Fields that only some families have."""
    if family == "Domino":
        return _read_domino(data)
    if family in ("DSpark", "DeepSpec"):
        return _read_dspark(data, place, tensors)
    return _read_dflash2(data) if family == "DFlash 2" else {}


def _read_domino(data: Mapping[str, Any]) -> dict[str, Any]:
    """Source: sgl-project/SpecForge, specforge/modeling/draft/domino.py (_init_draft_head, suffix_start).

    With `shift_label` every row of the block predicts, the anchor's the first token.
    """
    shifted = optional(data, False, "dflash_config.shift_label")
    require_bool("dflash_config.shift_label", shifted)
    correction = CorrectionConfig(
        kind="domino",
        rank=required(data, "dflash_config.emb_dim"),
        state_size=required(data, "dflash_config.gru_hidden_dim"),
        skip=optional(data, 0, "dflash_config.pure_draft_prefix_len"),
    )
    return {"correction": correction, **_sampled_from_anchor(data, shifted)}


def _read_dspark(data: Mapping[str, Any], place: str, tensors: Collection[str]) -> dict[str, Any]:
    """The fields of a DSpark head, every row of whose block predicts: row k the token k + 1.

    The confidence head, which tells how many of a chain's tokens to verify, is not read: the tree budget decides that.

    Source: sgl-project/SpecForge, specforge/modeling/draft/dspark.py (build_markov_head) and
    specforge/algorithms/common/dflash_family_model.py (_build_dspark_labels_and_mask), and deepseek-ai/DeepSpec,
    deepspec/modeling/dspark/qwen3/config.py.
    """
    rank = required(data, f"{place}markov_rank")
    correction = None
    if rank != 0:
        correction = CorrectionConfig(
            kind="markov", rank=rank, form=optional(data, "vanilla", f"{place}markov_head_type")
        )
    own = {
        "own_embedding": "embed_tokens.weight" in tensors,
        "draft_vocab_size": data.get("vocab_size") if "lm_head.weight" in tensors else None,
    }
    return {"correction": correction, **_sampled_from_anchor(data, True), **({} if place else own)}


def _read_dflash2(data: Mapping[str, Any]) -> dict[str, Any]:
    """Source: vllm-project/vllm, vllm/model_executor/models/qwen3_dflash2.py."""
    return dflash2_fields(data, "dflash_config.")


def dflash2_fields(data: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The fields of a DFlash 2 head, which stand behind the path `place`."""
    correction = CorrectionConfig(
        kind="selector",
        rank=required(data, f"{place}selector_rank"),
        top_k=required(data, f"{place}selector_top_k"),
    )
    options = DFlash2Config(
        kernel_size=required(data, f"{place}conv_kernel_size"),
        group_size=required(data, f"{place}conv_group_size"),
        embedding_scale=optional(data, 1.0, f"{place}input_embedding_scale"),
        logit_scale=optional(data, 1.0, f"{place}output_multiplier"),
        logit_softcap=optional(data, None, f"{place}final_logit_softcapping") or None,
    )
    return {"correction": correction, "dflash2": options}


def _sampled_from_anchor(data: Mapping[str, Any], flag: bool) -> dict[str, Any]:
    """Where every row of a block predicts, a draft has a token more than where the anchor's row does not."""
    rows = required(data, "block_size", "dflash_config.block_size")
    return {"sample_from_anchor": flag, **({"block_size": rows + 1} if flag and isinstance(rows, int) else {})}


def write_extra(
    correction: CorrectionConfig | None, options: DFlash2Config | None, *, sample_from_anchor: bool
) -> dict[str, Any]:
    """The fields of `dflash_config` that `read_fields` reads for one family alone."""
    if correction is None:
        return {"projector_type": "dspark", "markov_rank": 0} if sample_from_anchor else {}
    if correction.kind == "domino":
        return {
            "projector_type": "domino",
            "emb_dim": correction.rank,
            "gru_hidden_dim": correction.state_size,
            "pure_draft_prefix_len": correction.skip,
            "shift_label": sample_from_anchor,
        }
    if correction.kind == "markov":
        return {"projector_type": "dspark", "markov_rank": correction.rank, "markov_head_type": correction.form}
    assert options is not None
    return {
        "selector_rank": correction.rank,
        "selector_top_k": correction.top_k,
        "conv_kernel_size": options.kernel_size,
        "conv_group_size": options.group_size,
        "input_embedding_scale": options.embedding_scale,
        "output_multiplier": options.logit_scale,
        "final_logit_softcapping": options.logit_softcap,
    }


def causal_flag(data: Mapping[str, Any]) -> bool | None:
    """What a published config says about its block; None where it says nothing.

    Raises:
        JetSpecError: a flag is no boolean, or two of them disagree.
    """
    for path in CAUSAL_FLAGS:
        if (value := lookup(data, path)) is not None:
            require_bool(path, value)
    flag: bool | None = optional(data, None, *CAUSAL_FLAGS)
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
