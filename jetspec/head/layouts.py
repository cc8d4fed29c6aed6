"""Which layout a head's files are in, and what its tensors are called there.

| layout | told by | families |
| --- | --- | --- |
| DFlash | `dflash_config`, `published.ARCHITECTURES` | JetSpec, DFlash, Domino, DSpark, DFlash 2 |
| EAGLE, SpecForge | an architecture of `published_eagle3`, `draft_vocab_size` | EAGLE-3 |
| speculators | `speculators_model_type` | EAGLE-3, DFlash, DSpark, DFlash 2 |
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jetspec.errors import JetSpecError
from jetspec.head import published, published_eagle3, speculators
from jetspec.head.config import HeadConfig

#: Tensors that a head does not need, by the beginning or the end of their name: those of training, and the confidence
#: head, whose part the tree budget plays.
UNUSED = ("confidence_head.", "verifier_lm_head.", "verifier_norm.", "rotary_emb.inv_freq")
#: Beginnings of names: the publishers' and JetSpec's. The wrapper `logit_head.` is of early Domino and DSpark heads.
#: Source: sgl-project/SpecForge, specforge/modeling/draft/dflash.py (normalize_draft_head_checkpoint_keys).
MODULES = {
    "prefix_gru.": "correction.prefix_gru.",
    "embed_proj.": "correction.embed_proj.",
    "markov_head.": "correction.",
    "candidate_selector.": "correction.",
}
#: The norms of the first layer's entries in an EAGLE-3 head.
FIRST_LAYER = {
    "layers.0.input_layernorm.": "layers.0.input_layernorm.embed.",
    "layers.0.hidden_norm.": "layers.0.input_layernorm.feature.",
}


class Layout(NamedTuple):
    """The name of a layout, the configuration of a head in it, and whether that says if the head's block is causal."""

    name: str
    config: HeadConfig
    says_causal: bool

    def file_name(self, name: str) -> str:
        """The name under which the files have a tensor of JetSpec's."""
        name = "d2t" if name == "token_ids" else published_name(name, self.config)
        return name.replace("layers.0.", "midlayer.") if self.name in ("EAGLE", "SpecForge") else name


def read_layout(data: Mapping[str, Any], tensors: Collection[str], causal: bool | None = None) -> Layout:
    """Tell the layout of a head's files, and read its configuration.

    Args:
        data: the content of `config.json`.
        tensors: the names of the tensors.
        causal: whether the block is causal, for a config in the layout of DFlash heads that does not say so.

    Raises:
        JetSpecError: the layout or a field of it is not known, a field is missing, or `causal` contradicts the config.
    """
    if "speculators_model_type" in data:
        name, fields, says_causal = "speculators", speculators.read_fields(data, tensors), True
    elif published_eagle3.is_eagle3(data):
        name = "EAGLE" if published_eagle3.EAGLE[0] in data["architectures"] else "SpecForge"
        fields, says_causal = published_eagle3.read_fields(data, tensors), True
    else:
        fields = published.read_fields(data, causal, tensors)
        # The publishers of the other families have no causal block, so there the question does not arise.
        asked = published.read_family(data) == "DFlash"
        name, says_causal = "DFlash", not asked or published.causal_flag(data) is not None
    config = HeadConfig(**fields)
    if causal not in (None, config.causal):
        raise JetSpecError(f"causal={causal}: the head's config says {config.causal}; leave causal out")
    return Layout(name, config, says_causal)


def own_tensors(tensors: Mapping[str, Tensor], config: HeadConfig) -> dict[str, Tensor]:
    """The tensors of a published head under JetSpec's names.

    Raises:
        JetSpecError: `d2t` and `t2d` are not there where the vocabulary is reduced, or say different things.
    """
    named = {own_name(name, config): tensor for name, tensor in tensors.items() if not _is_unused(name)}
    offsets, chosen = named.pop("d2t", None), named.pop("t2d", None)
    if not config.reduced_vocab:
        return named
    if offsets is None:
        raise JetSpecError(
            f"the head's tensors lack d2t, which a reduced vocabulary needs (draft_vocab_size={config.draft_vocab_size}"
            f" of vocab_size={config.vocab_size})"
        )
    return {**named, "token_ids": _token_ids(offsets, chosen, config)}


def published_tensors(tensors: Mapping[str, Tensor], config: HeadConfig) -> dict[str, Tensor]:
    """The inverse of `own_tensors`, in speculators' layout and that of DFlash heads."""
    named = {published_name(name, config): tensor for name, tensor in tensors.items()}
    token_ids = named.pop("token_ids", None)
    if token_ids is not None:
        named["d2t"] = token_ids - torch.arange(len(token_ids), device=token_ids.device)
        named["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool, device=token_ids.device)
        named["t2d"][token_ids] = True
    return named


def own_name(name: str, config: HeadConfig) -> str:
    """JetSpec's name of a published tensor."""
    name = name.removeprefix("logit_head.").replace("midlayer.", "layers.0.")
    return _renamed(name, _renames(config))


def published_name(name: str, config: HeadConfig) -> str:
    """The name under which a tensor of JetSpec's is published."""
    return _renamed(name, {ours: theirs for theirs, ours in _renames(config).items()})


def _renames(config: HeadConfig) -> dict[str, str]:
    if config.kind == "eagle3":
        return FIRST_LAYER
    kind = None if config.correction is None else config.correction.kind
    modules = {
        "domino": ("prefix_gru.", "embed_proj."),
        "markov": ("markov_head.",),
        "selector": ("candidate_selector.",),
    }
    return {theirs: MODULES[theirs] for theirs in modules.get(kind or "", ())}


def _renamed(name: str, renames: Mapping[str, str]) -> str:
    for before, after in renames.items():
        if name.startswith(before):
            return after + name.removeprefix(before)
    return name


def _is_unused(name: str) -> bool:
    name = name.removeprefix("logit_head.")
    return name.startswith(UNUSED) or name.endswith(UNUSED)


def _token_ids(offsets: Tensor, chosen: Tensor | None, config: HeadConfig) -> Tensor:
    """The target's tokens that the head proposes, from `d2t`: what to add to a token's number.

    Source: SafeAILab/EAGLE, eagle/model/cnets.py (topK_genrate), and vllm-project/speculators, src/speculators/model.py
    (DraftVocabMixin).
    """
    size, vocab_size = config.draft_vocab_size, config.vocab_size
    if offsets.shape != (size,) or offsets.dtype.is_floating_point:
        raise JetSpecError(f"tensor d2t, {offsets.dtype} of shape {tuple(offsets.shape)}: must hold {size} integers")
    token_ids = torch.arange(len(offsets)) + offsets.long().cpu()
    if int(token_ids.min()) < 0 or int(token_ids.max()) >= vocab_size or len(token_ids.unique()) != size:
        raise JetSpecError(f"tensor d2t: must name {size} different tokens below vocab_size ({vocab_size})")
    if chosen is None:
        return token_ids
    if chosen.shape != (vocab_size,):
        raise JetSpecError(f"tensor t2d has shape {tuple(chosen.shape)}: must have {vocab_size} entries (vocab_size)")
    if not torch.equal(chosen.cpu().bool().nonzero().flatten(), token_ids.sort().values):
        raise JetSpecError("tensors d2t and t2d name different tokens: the head's vocabulary is not clear")
    return token_ids
