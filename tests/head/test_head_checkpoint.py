"""Writing and reading heads: the same logits come back, and what does not fit is named."""

from __future__ import annotations

import json
import logging
import stat

import pytest
import torch
from safetensors.torch import load_file, save_file

from jetspec.errors import JetSpecError
from jetspec.head import checkpoint, load_head, save_head
from tests.helpers.tiny_head import WINDOWED, random_aux_hidden_states, tiny_head

PUBLISHED_NAMES = {"fc.weight", "hidden_norm.weight", "norm.weight"} | {
    f"layers.{layer}.{name}.weight"
    for layer in (0, 1)
    for name in (
        *(f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
        *(f"mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj")),
        "input_layernorm",
        "post_attention_layernorm",
    )
}


def hidden(head) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    aux_hidden_states, embeds = random_aux_hidden_states(head, 6, generator), torch.randn(1, 5, 32, generator=generator)
    cache, slots = head.new_cache(2, 4), torch.arange(6)
    head.extend(aux_hidden_states, slots, slots, cache)
    return head.forward_blocks(embeds, torch.arange(6, 11)[None], [slots], cache)


@pytest.mark.parametrize(
    "kind", [{"causal": True}, {"causal": False, "shifted": True}, WINDOWED, {"attention_bias": True}]
)
def test_reloads_to_the_same_outputs(tmp_path, kind):
    head = tiny_head(1, **kind)
    save_head(head, tmp_path / "head")
    loaded = load_head(tmp_path / "head")
    assert loaded.config == head.config
    assert torch.equal(hidden(loaded), hidden(head))


def test_reloads_in_half_precision(tmp_path):
    head = tiny_head(2)
    save_head(head, tmp_path, dtype=torch.bfloat16)
    assert head.dtype == torch.float32
    rounded = tiny_head(2).to(torch.bfloat16)
    assert load_head(tmp_path).dtype == torch.bfloat16
    assert torch.equal(hidden(load_head(tmp_path)), hidden(rounded))
    assert torch.equal(hidden(load_head(tmp_path, dtype=torch.float32)), hidden(rounded.float()))
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_tensor_names_are_the_published_ones(tmp_path):
    save_head(tiny_head(), tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == PUBLISHED_NAMES


def test_loaded_head_can_be_trained_further(tmp_path):
    save_head(tiny_head(), tmp_path)
    head = load_head(tmp_path)
    assert all(parameter.requires_grad for parameter in head.parameters())
    context = head.context(random_aux_hidden_states(head, 4, torch.Generator().manual_seed(0)))
    head.forward_train(context, torch.ones(1, 5, 32), torch.tensor([3])).sum().backward()


def test_saving_replaces_whole_files_and_leaves_no_others(tmp_path, monkeypatch):
    save_head(tiny_head(1), tmp_path)
    before = hidden(load_head(tmp_path))

    def full_disk(*_):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Path, "replace", full_disk)
        with pytest.raises(OSError, match="no space"):
            save_head(tiny_head(2), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert torch.equal(hidden(load_head(tmp_path)), before)
    save_head(tiny_head(2), tmp_path)
    assert torch.equal(hidden(load_head(tmp_path)), hidden(tiny_head(2)))


def test_weights_are_as_readable_as_the_config(tmp_path):
    save_head(tiny_head(), tmp_path)
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("config.json", "model.safetensors")}
    assert len(modes) == 1


def shard(folder) -> None:
    """Split model.safetensors in two and write the index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {f"model-{i + 1:05d}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_sharded_weights(tmp_path):
    save_head(tiny_head(3), tmp_path)
    shard(tmp_path)
    assert torch.equal(hidden(load_head(tmp_path)), hidden(tiny_head(3)))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(JetSpecError, match=r"model-00002-of-00002.safetensors does not exist"):
        load_head(tmp_path)


def test_index_without_weight_map_is_explained(tmp_path):
    save_head(tiny_head(), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model.safetensors.index.json")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(JetSpecError, match="lacks weight_map"):
        load_head(tmp_path)


def test_saving_over_a_sharded_head_leaves_no_stale_shards_in_charge(tmp_path):
    save_head(tiny_head(3), tmp_path)
    shard(tmp_path)
    save_head(tiny_head(4), tmp_path)
    assert torch.equal(hidden(load_head(tmp_path)), hidden(tiny_head(4)))


def change(folder, edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_missing_tensor_is_named(tmp_path):
    save_head(tiny_head(), tmp_path)
    change(tmp_path, lambda tensors: tensors.pop("layers.1.self_attn.k_norm.weight"))
    with pytest.raises(JetSpecError, match=r"missing tensors layers.1.self_attn.k_norm.weight"):
        load_head(tmp_path)


def test_unknown_tensors_are_named_the_first_few(tmp_path):
    save_head(tiny_head(), tmp_path)
    change(tmp_path, lambda tensors: tensors.update({f"extra.{i}": torch.zeros(1) for i in range(8)}))
    with pytest.raises(JetSpecError, match=r"unknown tensors extra\.0, .*extra\.4 and 3 more"):
        load_head(tmp_path)


def test_wrong_shape_names_tensor_and_both_shapes(tmp_path):
    save_head(tiny_head(), tmp_path)
    change(tmp_path, lambda tensors: tensors.update({"fc.weight": torch.zeros(32, 96)}))
    with pytest.raises(JetSpecError, match=r"fc.weight .*\(32, 96\).*\(32, 64\)"):
        load_head(tmp_path)


@pytest.mark.parametrize("trained", [True, False])
def test_a_head_without_a_causal_flag_is_bidirectional_unless_told(tmp_path, caplog, trained):
    """The class that publishes DFlash heads writes no flag."""
    save_head(tiny_head(5, causal=trained), tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    del data["is_causal"], data["dflash_config"]["causal"], data["dflash_config"]["causal_head"]
    (tmp_path / "config.json").write_text(json.dumps(data))
    with caplog.at_level(logging.WARNING, "jetspec"):
        for causal in (True, False):
            assert torch.equal(hidden(load_head(tmp_path, causal=causal)), hidden(tiny_head(5, causal=causal)))
        assert not caplog.records
        assert torch.equal(hidden(load_head(tmp_path)), hidden(tiny_head(5, causal=False)))
    [record] = caplog.records
    assert str(tmp_path) in record.getMessage()
    assert "bidirectional" in record.getMessage()


@pytest.mark.parametrize("causal", [True, False])
def test_a_head_with_a_causal_flag_is_not_loaded_as_the_other_kind(tmp_path, caplog, causal):
    save_head(tiny_head(5, causal=causal), tmp_path)
    with caplog.at_level(logging.WARNING, "jetspec"):
        assert load_head(tmp_path).config.causal is load_head(tmp_path, causal=causal).config.causal is causal
    assert not caplog.records
    with pytest.raises(JetSpecError, match=f"causal={not causal}: the head's config says {causal}"):
        load_head(tmp_path, causal=not causal)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, "needs config.json"),
        ("config.json", b"{", "not valid JSON"),
        ("config.json", b"[]", "must hold a JSON object"),
        ("model.safetensors", None, "model.safetensors does not exist"),
        ("model.safetensors", b"short", "not a valid safetensors file"),
    ],
)
def test_broken_folders_are_explained(tmp_path, file, content, message):
    save_head(tiny_head(), tmp_path)
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(JetSpecError, match=message):
        load_head(tmp_path)


def test_alias_of_a_shipped_head(tmp_path, monkeypatch):
    save_head(tiny_head(6), tmp_path / "heads" / "tiny-alias")
    monkeypatch.setattr(checkpoint.resources, "files", lambda _: tmp_path)
    assert list(checkpoint.shipped_heads()) == ["tiny-alias"]
    assert torch.equal(hidden(load_head("tiny-alias")), hidden(tiny_head(6)))


def test_hub_repository(tmp_path, monkeypatch):
    save_head(tiny_head(7), tmp_path)
    asked = []

    def download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(checkpoint, "snapshot_download", download)
    assert torch.equal(hidden(load_head("someone/some-head")), hidden(tiny_head(7)))
    assert asked == [("someone/some-head", ["config.json", "*.safetensors", "*.safetensors.index.json"])]


@pytest.mark.parametrize("name", ["./no/such/folder", "/no/such/folder", "../x", "", "x" * 5000])
def test_name_that_is_nothing_is_explained(name):
    with pytest.raises(JetSpecError, match=r"no draft head .* no directory, no shipped head"):
        load_head(name)
