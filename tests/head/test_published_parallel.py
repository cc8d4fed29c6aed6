"""DFlash, Domino, DSpark and DFlash 2 heads in every layout: what they draft, and what is refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from jetspec.errors import JetSpecError
from jetspec.head import load_head, save_head
from tests.helpers.drafted import PROMPT, check_drafts, generate, published_rounds
from tests.helpers.published_heads import BLOCK, LAYERS, REDUCED, VOCAB, Published, dflash
from tests.helpers.tiny import tiny_target

DOMINO = {"dflash_config__shift_label": False, "dflash_config__pure_draft_prefix_len": 0}
SCALES = {
    "dflash_config__output_multiplier": 0.5,
    "dflash_config__final_logit_softcapping": 3.0,
    "dflash_config__input_embedding_scale": 2.0,
}
HEADS = {
    "DFlash / DFlash": lambda: dflash("DFlash"),
    "DFlash / Domino": lambda: dflash("DFlash", "Domino", 1),
    "DFlash / Domino, rows from the first mask on": lambda: dflash("DFlash", "Domino", 2, **DOMINO),
    "DFlash / DSpark": lambda: dflash("DFlash", "DSpark", 3),
    "DFlash / DSpark, gated": lambda: dflash("DFlash", "DSpark", 4, dflash_config__markov_head_type="gated"),
    "DFlash / DSpark, recurrent": lambda: dflash("DFlash", "DSpark", 5, dflash_config__markov_head_type="rnn"),
    "DFlash / DFlash 2": lambda: dflash("DFlash", "DFlash 2", 6),
    "DFlash / DFlash 2, scaled": lambda: dflash("DFlash", "DFlash 2", 7, **SCALES),
    "DFlash / DSpark, of DeepSpec": lambda: dflash("DeepSpec", "DSpark", 8),
    "speculators / DFlash": lambda: dflash("speculators", "DFlash", 9),
    "speculators / DFlash, few tokens": lambda: dflash("speculators", "DFlash", 10, size=REDUCED),
    "speculators / DSpark": lambda: dflash("speculators", "DSpark", 11, size=REDUCED),
    "speculators / DSpark, recurrent": lambda: dflash("speculators", "DSpark", 12, markov_head_type="rnn"),
    "speculators / DFlash 2": lambda: dflash("speculators", "DFlash 2", 13),
}


#: Variants that differ from another one in little.
SLOW = {
    "DFlash / DFlash",
    "DFlash / Domino, rows from the first mask on",
    "DFlash / DSpark",
    "DFlash / DSpark, gated",
    "DFlash / DFlash 2",
    "speculators / DFlash",
    "speculators / DSpark, recurrent",
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in HEADS])
def test_trees_are_those_of_the_publishers_head(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # All tokens are candidates, so that the reference need not choose any.
    monkeypatch.setattr("jetspec.head.path_children.CANDIDATES", 128)
    published = HEADS[name]()
    head = load_head(published.write(tmp_path / "head"))
    layout, _, family = name.partition(",")[0].partition(" / ")
    assert (head.layout, head.config.family) == (layout, family)
    check_drafts(published, published_rounds(head))
    save_head(head, tmp_path / "again")
    again = load_head(tmp_path / "again")
    assert again.config.replace(num_target_layers=None) == head.config.replace(num_target_layers=None)
    assert {n: t.tolist() for n, t in again.state_dict().items()} == {
        n: t.tolist() for n, t in head.state_dict().items()
    }


def oracle(spoken: list[int], seed: int = 0) -> Published:
    """A DSpark head whose Markov table knows which token follows which; its layers know nothing."""
    published = dflash("DFlash", "DSpark", seed, dflash_config__markov_rank=VOCAB)
    published.tensors["markov_head.markov_w1.weight"] = torch.eye(VOCAB)
    table = torch.zeros(VOCAB, VOCAB)
    for token, following in pairwise(spoken):
        table[following, token] = 100.0
    published.tensors["markov_head.markov_w2.weight"] = table
    return published


def test_drafts_that_a_correction_makes_right_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jetspec.head.path_children.CANDIDATES", VOCAB)  # the layers, which know nothing, choose none
    prompt = [*PROMPT, *generate(None, 2)[0]]
    answer, _ = generate(None, 12, prompt)
    spoken = [prompt[-1], *answer[: BLOCK + 2]]
    assert len(set(spoken)) == len(spoken), "the table tells one token what follows it: pick another prompt"
    drafted, rounds = generate(load_head(oracle(spoken).write(tmp_path)), 12, prompt)
    assert drafted == answer
    assert len(rounds[0].record.new_tokens) == BLOCK + 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_they_draft_in_half_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    for name in ("DFlash / Domino", "DFlash / DFlash 2", "speculators / DSpark"):
        head = load_head(HEADS[name]().write(tmp_path / name), dtype=dtype)
        assert head.dtype == dtype
        assert len(published_rounds(head)) >= 2


def test_early_names_of_tensors_are_read(tmp_path: Path) -> None:
    published = dflash("DFlash", "Domino", 1)
    expected = load_head(published.write(tmp_path / "late"))
    for name in [name for name in published.tensors if name.startswith(("prefix_gru", "embed_proj"))]:
        published.tensors[f"logit_head.{name}"] = published.tensors.pop(name)
    head = load_head(published.write(tmp_path / "early"))
    assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in head.state_dict().items())


def test_a_head_with_a_correction_is_not_trained(tmp_path: Path) -> None:
    head = load_head(dflash("DFlash", "Domino").write(tmp_path))
    with pytest.raises(JetSpecError, match="a Domino head cannot be trained here"):
        head.forward_text(torch.zeros(2, 96), torch.zeros(3).long(), torch.tensor([1]), lambda ids: ids)


BROKEN: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "unknown field": ("DFlash", "DFlash", {"dflash_config__use_swa": True}, r"dflash_config.use_swa=True: is not a fi"),
    "a field of others": ("DFlash", "DFlash", {"dflash_config__emb_dim": 4}, r"dflash_config.emb_dim=4: is not a fi"),
    "unknown projector": ("DFlash", "DFlash", {"dflash_config__projector_type": "mlp"}, r"projector_type='mlp'"),
    "two families": (
        "DFlash",
        "DSpark",
        {"dflash_config__projector_type": "domino"},
        r"contradicts itself: architectures = \['DSparkDraftModel'\], dflash_config.projector_type = 'domino'",
    ),
    "unknown architecture": (
        "DFlash",
        "DFlash",
        {"architectures": ["MedusaModel"]},
        r"architectures=\['MedusaModel'\]",
    ),
    "no width": ("DFlash", "Domino", {"dflash_config__emb_dim": None}, r"lacks dflash_config.emb_dim"),
    "no state": ("DFlash", "Domino", {"dflash_config__gru_hidden_dim": None}, r"lacks dflash_config.gru_hidden_dim"),
    "negative prefix": ("DFlash", "Domino", {"dflash_config__pure_draft_prefix_len": -1}, r"skip=-1: must be at least"),
    "no flag": ("DFlash", "Domino", {"dflash_config__shift_label": 1}, r"dflash_config.shift_label=1: must be true or"),
    "no rank": ("DFlash", "DSpark", {"dflash_config__markov_rank": None}, r"lacks dflash_config.markov_rank"),
    "unknown form": ("DFlash", "DSpark", {"dflash_config__markov_head_type": "lstm"}, r"form='lstm'"),
    "no rank at the top": ("DeepSpec", "DSpark", {"markov_rank": None}, r"lacks markov_rank"),
    "no selector": ("DFlash", "DFlash 2", {"dflash_config__selector_rank": None}, r"lacks dflash_config.selector_rank"),
    "no candidates": ("DFlash", "DFlash 2", {"dflash_config__selector_top_k": 0}, r"top_k=0: must be at least 1"),
    "uneven groups": ("DFlash", "DFlash 2", {"dflash_config__conv_group_size": 7}, r"conv_group_size=7: must divide"),
    "no mask": ("speculators", "DFlash", {"mask_token_id": None}, r"lacks mask_token_id"),
    "no layers": ("speculators", "DFlash", {"aux_hidden_state_layer_ids": None}, r"lacks aux_hidden_state_layer_ids"),
    "a Llama block": ("speculators", "DFlash", {"transformer_layer_config__model_type": "llama"}, r"must be 'qwen3'"),
    "experts": ("speculators", "DFlash 2", {"draft_ffn_type": "moe"}, r"draft_ffn_type='moe': must be 'dense'"),
    "a wider target": ("speculators", "DFlash", {"target_hidden_size": 64}, r"target_hidden_size=64"),
    "an unknown field": ("speculators", "DSpark", {"markov_bias": True}, r"markov_bias=True: is not a field"),
    "mixed windows": (
        "speculators",
        "DFlash",
        {
            "transformer_layer_config__use_sliding_window": True,
            "transformer_layer_config__sliding_window": 4,
            "transformer_layer_config__layer_types": ["sliding_attention", "full_attention"],
        },
        r"sliding_window_non_causal=False",
    ),
    "a wrong width": ("DFlash", "DSpark", {"dflash_config__markov_rank": 5}, r"tensor markov_head.markov_w1.weight"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_configs_are_refused_by_name(name: str, tmp_path: Path) -> None:
    layout, family, changes, message = BROKEN[name]
    published = dflash(layout, family)
    published = Published(published.changed(**changes).config, published.tensors, published.draft)
    with pytest.raises(JetSpecError, match=message):
        load_head(published.write(tmp_path))


def test_a_missing_tensor_has_the_publisher_s_name(tmp_path: Path) -> None:
    published = dflash("DFlash", "Domino")
    del published.tensors["embed_proj.2.weight"]
    with pytest.raises(JetSpecError, match=r"missing tensors embed_proj.2.weight$"):
        load_head(published.write(tmp_path))


@pytest.mark.parametrize(("layout", "family"), [("DFlash", "DSpark"), ("DFlash", "DFlash 2"), ("DeepSpec", "DSpark")])
def test_a_table_of_too_few_tokens_is_refused(layout: str, family: str, tmp_path: Path) -> None:
    """A token of the target that such a head does not know could be in any prompt."""
    head = load_head(dflash(layout, family).write(tmp_path))
    with pytest.raises(JetSpecError, match=r"knows only 128 tokens \(vocab_size\), the target embeds 140"):
        head.validate_for(tiny_target(num_hidden_layers=LAYERS, vocab_size=140))
