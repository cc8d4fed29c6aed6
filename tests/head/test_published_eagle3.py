"""EAGLE-3 heads in the layouts of EAGLE, SpecForge and speculators: what they draft, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from jetspec.errors import JetSpecError
from jetspec.head import checkpoint, load_head, save_head
from tests.helpers.drafted import PROMPT, check_drafts, generate, published_rounds
from tests.helpers.published_heads import HIDDEN, VOCAB, Published, eagle3, published_model, published_target
from tests.helpers.tiny import tiny_target

QWEN3 = {"transformer_layer_config__model_type": "qwen3"}
HEADS = {
    "EAGLE": lambda: eagle3("EAGLE"),
    "EAGLE, all tokens": lambda: eagle3("EAGLE", size=VOCAB),
    "SpecForge": lambda: eagle3("SpecForge", 1),
    "SpecForge, norms": lambda: eagle3("SpecForge", 2, fc_norm=True, norm_output=True),
    "SpecForge, layers": lambda: eagle3(
        "SpecForge", 3, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 5], "use_aux_hidden_state": True}
    ),
    "speculators": lambda: eagle3("speculators", 4),
    "speculators, Qwen3": lambda: eagle3("speculators", 5, **QWEN3, eagle_aux_hidden_state_layer_ids=[1, 5, 7]),
    "speculators, layers": lambda: eagle3("speculators", 6, layers=2, norm_before_residual=True),
    "speculators, norms": lambda: eagle3("speculators", 7, fc_norm=True, norm_output=True),
    "speculators, joint norm": lambda: eagle3("speculators", 8, norm_before_fc=True, **QWEN3, layers=2),
}


#: Variants that differ from another one in little.
SLOW = {"EAGLE, all tokens", "SpecForge, layers", "speculators, layers", "speculators, norms"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in HEADS])
def test_trees_are_those_of_the_publishers_head(name: str, tmp_path: Path) -> None:
    published = HEADS[name]()
    folder = published.write(tmp_path / "head")
    head = load_head(folder)
    assert (head.config.family, head.layout) == ("EAGLE-3", name.partition(",")[0])
    check_drafts(published, published_rounds(head))
    # Written anew, it is in speculators' layout.
    save_head(head, tmp_path / "again")
    again = load_head(tmp_path / "again")
    assert again.config.replace(block_size=head.config.block_size) == head.config
    assert {n: t.tolist() for n, t in again.state_dict().items()} == {
        n: t.tolist() for n, t in head.state_dict().items()
    }


def test_the_original_repository_s_pickled_file_is_read(tmp_path: Path) -> None:
    published = eagle3("EAGLE")
    head = load_head(published.write(tmp_path / "pickled", pickled=True))
    expected = load_head(published.write(tmp_path / "plain"))
    assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in head.state_dict().items())


def test_a_pickled_file_runs_no_code(tmp_path: Path) -> None:
    folder = eagle3("EAGLE").write(tmp_path, pickled=True)
    torch.save({"fc.weight": Path("/")}, folder / "pytorch_model.bin")
    with pytest.raises(JetSpecError, match=r"pytorch_model.bin holds more than tensors, or is broken"):
        load_head(folder)


def test_a_head_reads_the_embedding_that_it_brings(tmp_path: Path) -> None:
    published = eagle3("speculators", 9)
    generator = torch.Generator().manual_seed(9)
    published.tensors["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN, generator=generator)
    head = load_head(published.write(tmp_path))
    assert head.config.own_embedding
    check_drafts(published, published_rounds(head))


def test_an_embedding_that_equals_the_target_s_is_kept_once(tmp_path: Path) -> None:
    published = eagle3("speculators", size=VOCAB)
    model = published_target().model
    equal, other = published.tensors, dict(published.tensors)
    equal["embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
    equal["lm_head.weight"] = model.get_output_embeddings().weight.detach().clone()
    other["embed_tokens.weight"] = equal["embed_tokens.weight"] + 1e-3
    for tensors, shared in ((equal, True), (other, False)):
        head = load_head(Published(published.config, tensors, published.draft).write(tmp_path / str(shared)))
        published_rounds(head)
        assert (head.embed_tokens.weight is model.get_input_embeddings().weight) == shared
        assert (head.lm_head.weight is model.get_output_embeddings().weight) == shared
        assert torch.equal(head.embed_tokens.weight, tensors["embed_tokens.weight"])


def test_a_pickled_file_on_the_hub_is_fetched_where_there_is_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eagle3("EAGLE").write(tmp_path, pickled=True)
    asked = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append("pytorch_model.bin" in allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(checkpoint, "snapshot_download", download)
    assert load_head("someone/eagle3").layout == "EAGLE"
    assert asked == [False, True]


def test_a_narrower_head_brings_its_own_embedding(tmp_path: Path) -> None:
    """`target_hidden_size` is the width of what fc reads; the embedding is as wide as the head."""
    published = eagle3("EAGLE", 10, hidden_size=24, num_attention_heads=2, num_key_value_heads=1)
    generator = torch.Generator().manual_seed(10)
    shapes = {name: list(tensor.shape) for name, tensor in published.tensors.items()}
    for name, shape in shapes.items():
        if name not in ("d2t", "t2d"):
            keep = (3 * HIDDEN,) if name == "fc.weight" else (40,)
            sizes = [size if size in keep else size // 2 for size in shape]
            published.tensors[name] = torch.randn(sizes, generator=generator) * 0.3
    without = published.changed(target_hidden_size=HIDDEN)
    with pytest.raises(JetSpecError, match=r"target_hidden_size=48: differs from hidden_size \(24\).*embed_tokens"):
        load_head(without.write(tmp_path / "without"))
    without.tensors["embed_tokens.weight"] = torch.randn(VOCAB, 24, generator=generator)
    head = load_head(without.write(tmp_path / "with"))
    assert len(published_rounds(head)) >= 2  # its answer is that of plain decoding


@pytest.mark.slow
def test_an_overfitted_head_is_accepted(tmp_path: Path) -> None:
    head = load_head(eagle3("SpecForge").write(tmp_path)).train()
    target = published_target()
    answer, _ = generate(None, 8)
    tokens = torch.tensor([*PROMPT, *answer])
    states = published_model()(tokens[None], output_hidden_states=True).hidden_states
    aux = torch.cat([states[number][0] for number in (2, 4, 5)], dim=-1).detach()
    anchors = torch.arange(len(PROMPT), len(PROMPT) + 4)
    assert head.token_ids is not None
    head.token_ids[:8] = tokens[-8:]  # the vocabulary holds what is said, in whatever order
    labels = torch.stack([torch.arange(a - len(PROMPT) + 1, a - len(PROMPT) + 4) for a in anchors.tolist()])
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
    for _ in range(40):
        hidden = head.forward_text(aux, tokens, anchors, lambda ids: head.embed(ids, target))[:, :3]
        loss = torch.nn.functional.cross_entropy(head.logits(hidden, target).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    drafted, rounds = generate(head.eval(), 8)
    assert drafted == answer
    assert max(len(r.record.new_tokens) for r in rounds) >= 3


BROKEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "no vocabulary": ("EAGLE", {"draft_vocab_size": None}, r"lacks draft_vocab_size"),
    "no width": ("SpecForge", {"hidden_size": None}, r"lacks hidden_size"),
    "two layers": ("EAGLE", {"num_hidden_layers": 2}, r"num_hidden_layers=2: must be 1"),
    "another activation": ("EAGLE", {"hidden_act": "gelu"}, r"hidden_act='gelu'"),
    "no final norm": ("SpecForge", {"norm_output": False}, r"norm_output=False"),
    "unknown field": ("EAGLE", {"logit_scale": 0.5}, r"logit_scale=0.5: is not a field that JetSpec knows"),
    "unknown option": ("SpecForge", {"eagle_config": {"parallel": True}}, r"eagle_config.parallel=True"),
    "dynamic angles": ("EAGLE", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"rope_type='dynamic'"),
    "layer of none": (
        "SpecForge",
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 2]}},
        r"target_layer_ids=\[0, 2, 2\]: must not name a layer twice",
    ),
    "too many tokens": ("EAGLE", {"draft_vocab_size": 129}, r"draft_vocab_size=129: must be at most vocab_size"),
    "fewer tokens": ("EAGLE", {"draft_vocab_size": 39}, r"d2t.*must hold 39 integers"),
    "another MLP": ("EAGLE", {"intermediate_size": 41}, r"tensor midlayer.mlp.*\(48, 40\).*asks for \(48, 41\)"),
    "no layer": ("speculators", {"transformer_layer_config": None}, r"lacks transformer_layer_config"),
    "no width of the layer": (
        "speculators",
        {"transformer_layer_config__hidden_size": None},
        r"lacks transformer_layer_config.hidden_size",
    ),
    "another layer": (
        "speculators",
        {"transformer_layer_config__model_type": "gemma2"},
        r"transformer_layer_config.model_type='gemma2'",
    ),
    "no angles": (
        "speculators",
        {"transformer_layer_config__rope_parameters": None},
        r"transformer_layer_config: the head's config lacks rope_parameters.rope_theta or rope_theta",
    ),
    "another kind": ("speculators", {"speculators_model_type": "mtp"}, r"speculators_model_type='mtp'"),
    "unknown field beside it": ("speculators", {"temperature": 2}, r"temperature=2: is not a field"),
    "the embedding's output": (
        "speculators",
        {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]},
        r"eagle_aux_hidden_state_layer_ids=\[0, 2, 4\].*0 is the embedding",
    ),
    "no number of tokens": (
        "speculators",
        {"speculators_config__proposal_methods": []},
        r"proposal_methods.0.speculative_tokens=None",
    ),
    "two norms": (
        "speculators",
        {"norm_before_fc": True, "fc_norm": True},
        r"norm_before_fc and fc_norm are both true",
    ),
    "a norm that is no flag": ("speculators", {"norm_output": 1}, r"norm_output=1: must be true or false"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_configs_are_refused_by_name(name: str, tmp_path: Path) -> None:
    layout, changes, message = BROKEN[name]
    published = eagle3(layout)
    published = Published(published.changed(**changes).config, published.tensors, published.draft)
    with pytest.raises(JetSpecError, match=message):
        load_head(published.write(tmp_path))


@pytest.mark.parametrize("layout", ["EAGLE", "SpecForge", "speculators"])
@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ("d2t", r"tensors lack d2t"),
        ("lm_head.weight", r"missing tensors lm_head.weight|needs the tensor lm_head.weight"),
        ("midlayer.hidden_norm.weight", r"missing tensors .*hidden_norm.weight"),
    ],
)
def test_a_missing_tensor_is_named(layout: str, tensor: str, message: str, tmp_path: Path) -> None:
    published = eagle3(layout)
    first = "layers.0" if layout == "speculators" else "midlayer"
    del published.tensors[tensor.replace("midlayer", first)]
    with pytest.raises(JetSpecError, match=message.replace(".*", f".*{re.escape(first)}." if ".*" in message else "")):
        load_head(published.write(tmp_path))


def test_a_vocabulary_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    published = eagle3("EAGLE")
    published.tensors["t2d"] = published.tensors["t2d"].roll(1)
    with pytest.raises(JetSpecError, match=r"d2t and t2d name different tokens"):
        load_head(published.write(tmp_path / "a"))
    del published.tensors["t2d"]
    published.tensors["d2t"] = torch.full_like(published.tensors["d2t"], 100)
    with pytest.raises(JetSpecError, match=r"d2t: must name 40 different tokens below vocab_size \(128\)"):
        load_head(published.write(tmp_path / "b"))


def test_a_target_that_the_head_cannot_read_is_refused(tmp_path: Path) -> None:
    """Six layers are too few for EAGLE-3's own choice: two of its three layers coincide."""
    head = load_head(eagle3("EAGLE").write(tmp_path))
    with pytest.raises(JetSpecError, match=r"reads the layers \[1, 2, 2\] of its target, which must be distinct"):
        head.validate_for(tiny_target())
