"""The target: what it knows of a model, what it refuses, and how it is loaded."""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaModel,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from jetspec import target as target_module
from jetspec.attention.interface import attention_over_rows
from jetspec.errors import JetSpecError
from jetspec.models.gguf import converted
from jetspec.models.loading import Alias, load_target, resolve_source
from jetspec.models.target import Target, default_target_layer_ids, fingerprint
from tests.helpers.forest import Part, Pool, plain_forward, random_ids
from tests.helpers.tiny import TEXT_VOCAB_SIZE, tiny_gemma3, tiny_llama, tiny_qwen3, tiny_target, tiny_tokenizer

LLAMA = {"hidden_size": 32, "num_hidden_layers": 4, "head_dim": 8, "vocab_size": TEXT_VOCAB_SIZE}


# What a target knows of its model


def test_sizes_and_names():
    target = tiny_target("llama", max_position_embeddings=99)
    assert (target.hidden_size, target.vocab_size, target.num_layers, target.max_context) == (48, 128, 6, 99)
    assert (target.name, target.device.type, target.dtype) == ("tiny-llama", "cpu", torch.float32)
    assert Target.from_model(tiny_llama(), name="other").name == "other"


def test_eos_is_whatever_anyone_calls_eos():
    model = tiny_llama(vocab_size=TEXT_VOCAB_SIZE, eos_token_id=3)
    model.generation_config.eos_token_id = [5, 7]
    tokenizer = tiny_tokenizer()
    assert Target.from_model(model, tokenizer).eos_token_ids == {3, 5, 7, tokenizer.eos_token_id}
    assert tiny_target("llama").eos_token_ids == frozenset()


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_any_built_model_can_be_wrapped(attn):
    ids = random_ids(9, seed=0)
    [(expected, _)] = plain_forward(tiny_llama(attn="eager"), [ids])
    output = Pool(Target.from_model(tiny_llama(attn=attn).requires_grad_(True).train())).forward([Part.chain(0, ids)])
    assert torch.allclose(output.logits, expected, atol=1e-4)


def test_gpt2_names_its_layers_otherwise():
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_head=2, n_layer=3, vocab_size=128, n_positions=64)).eval()
    ids = random_ids(9, seed=0)
    [(expected, aux_hidden_states)] = plain_forward(model, [ids], (0, 1))
    output = Pool(Target.from_model(model), blocks_each=4, target_layer_ids=(0, 1)).forward([Part.chain(0, ids)])
    assert torch.allclose(output.logits, expected, atol=1e-4)
    assert torch.allclose(output.aux_hidden_states, aux_hidden_states, atol=1e-4)


def test_outputs_carry_no_autograd_history():
    target = tiny_target("llama")
    output = Pool(target, target_layer_ids=(1,)).forward([Part.chain(0, random_ids(3, seed=0))], final_hidden=True)
    assert not any(tensor.requires_grad or tensor.grad_fn for tensor in output)
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert not any(module._forward_hooks for module in target.model.modules())


def test_hooks_are_removed_when_the_forward_fails(monkeypatch):
    target = tiny_target("llama")

    def fail(*args, **kwargs):
        raise RuntimeError("no")

    monkeypatch.setattr(target_module, "row_attention", fail)
    with pytest.raises(RuntimeError, match="no"):
        Pool(target, target_layer_ids=(1,)).forward([Part.chain(0, random_ids(3, seed=0))])
    assert not any(module._forward_hooks for module in target.model.modules())


@pytest.mark.parametrize("tie", [True, False])
def test_embedding_and_lm_head_are_the_models_own(tie):
    model = tiny_llama(tie_word_embeddings=tie)
    target = Target.from_model(model)
    ids = random_ids(6, seed=0).view(2, 3)
    hidden = torch.randn(2, 3, 48, requires_grad=True)
    assert torch.equal(target.embed(ids), model.model.embed_tokens.weight[ids])
    logits = target.lm_head(hidden)
    assert torch.allclose(logits, hidden @ model.lm_head.weight.T, atol=1e-5)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tie
    logits.sum().backward()
    assert hidden.grad is not None


def test_gemma_embeddings_come_scaled_as_its_own_module_gives_them():
    model = tiny_gemma3()
    ids = random_ids(4, seed=0)
    expected = model.model.embed_tokens.weight[ids] * 48**0.5
    assert torch.allclose(Target.from_model(model).embed(ids), expected, atol=1e-5)


def test_a_padded_vocabulary_gives_logits_as_wide_as_the_lm_head():
    target = tiny_target("qwen3", text=True)
    assert len(target.tokenizer) < target.vocab_size == TEXT_VOCAB_SIZE
    output = Pool(target).forward([Part.chain(0, torch.tensor([TEXT_VOCAB_SIZE - 1]))])
    assert output.logits.shape == (1, TEXT_VOCAB_SIZE)


# What a target refuses


@pytest.mark.parametrize("bad", [-1, 128])
def test_ids_outside_the_vocabulary_are_refused(bad):
    target = tiny_target("llama")
    with pytest.raises(JetSpecError, match=r"token ids .* 0\.\.127"):
        Pool(target).forward([Part.chain(0, torch.tensor([3, bad]))])
    with pytest.raises(JetSpecError, match="token ids"):
        target.embed(torch.tensor([bad]))


def test_an_empty_batch_is_refused():
    pool = Pool(tiny_target("llama"))
    empty = torch.empty(0, dtype=torch.int64)
    batch = target_module.RowBatch(empty, empty, empty, [])
    with pytest.raises(JetSpecError, match="empty"):
        pool.target.forward(batch, pool.cache)


def test_the_context_limit_is_the_last_position():
    target = tiny_target("llama", max_position_embeddings=8)
    Pool(target).forward([Part.chain(0, random_ids(8, seed=0))])
    with pytest.raises(JetSpecError, match=r"position 8 .* 8"):
        Pool(target).forward([Part.chain(0, random_ids(9, seed=0))])


def test_longrope_is_held_to_its_original_context():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
    rope |= {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6, "factor": 4.0}
    assert tiny_target("llama", rope_parameters=rope, max_position_embeddings=128).max_context == 32


@pytest.mark.parametrize("aux_hidden_states", [(-1,), (6,), (1, 1), (0, 99)])
def test_unknown_states_are_refused(aux_hidden_states):
    target = tiny_target("llama")
    with pytest.raises(JetSpecError, match="target_layer_ids"):
        target.validate_target_layer_ids(aux_hidden_states)
    with pytest.raises(JetSpecError, match="target_layer_ids"):
        Pool(target, aux_hidden_states=aux_hidden_states).forward([Part.chain(0, random_ids(1, seed=0))])


def test_taps_keep_their_order():
    target = tiny_target("llama")
    assert target.validate_target_layer_ids([4, 0]) == (4, 0)


@pytest.mark.parametrize(
    ("layers", "n", "expected"),
    [(36, 5, [1, 9, 17, 25, 33]), (30, 3, [1, 14, 27]), (6, 3, [1, 2, 3]), (6, 1, [3]), (28, 2, [1, 25])],
)
def test_default_taps(layers, n, expected):
    assert default_target_layer_ids(layers, n) == expected


@pytest.mark.parametrize(("layers", "n"), [(6, 4), (4, 2), (6, 0)])
def test_too_many_default_taps_are_refused(layers, n):
    with pytest.raises(JetSpecError, match="target_layer_ids"):
        default_target_layer_ids(layers, n)


def tiny_t5():
    config = T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=32)
    return T5ForConditionalGeneration(config)


def tiny_mamba():
    return MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=32, state_size=4))


def sliding_without_a_window():
    model = tiny_gemma3()
    model.model.layers[1].self_attn.sliding_window = None
    return model


def not_causal():
    model = tiny_llama()
    model.model.layers[2].self_attn.is_causal = False
    return model


def chunked():
    model = tiny_llama()
    model.config.layer_types = ["chunked_attention"] * 6
    return model


def attention_free_layer():
    model = tiny_llama()
    attention = model.model.layers[3].self_attn
    attention.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (tiny_t5, "encoder-decoder"),
        (tiny_mamba, "Mamba"),
        (lambda: tiny_gemma3(use_bidirectional_attention=True), "both directions"),
        (sliding_without_a_window, "layer 1 .*sliding_window"),
        (not_causal, "is_causal"),
        (chunked, "chunked_attention"),
        (attention_free_layer, r"layers \[3\]"),
        (lambda: LlamaModel(tiny_llama().config), "lm_head"),
    ],
)
def test_models_that_cannot_be_honoured_are_refused_by_name(build, message):
    with pytest.raises(JetSpecError, match=message):
        Target.from_model(build())


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"dropout": 0.1}, "dropout"),
        ({"attention_mask": torch.zeros(1)}, "attention_mask"),
        ({"is_causal": False}, "is_causal"),
        ({"row_attention": None}, "Target.forward"),
        ({"value": torch.zeros(1, 2, 3, 5)}, "width"),
    ],
)
def test_attention_keywords_that_change_the_result_are_refused(keywords, message):
    x = torch.zeros(1, 2, 3, 4)
    given = {"query": x, "key": x, "value": x, "row_attention": lambda q, *args, **kwargs: q, **keywords}
    with pytest.raises(JetSpecError, match=message):
        attention_over_rows(tiny_llama().model.layers[0].self_attn, **given)


# Loading


@pytest.fixture
def saved_model(tmp_path: Path) -> Path:
    tiny_qwen3(vocab_size=TEXT_VOCAB_SIZE).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_directory_loads_in_float32_on_the_cpu(saved_model):
    target = load_target(str(saved_model), device="cpu")
    assert target.dtype == torch.float32
    assert target.tokenizer.decode(target.tokenizer("hi ü")["input_ids"]) == "hi ü"
    source = tiny_qwen3(vocab_size=TEXT_VOCAB_SIZE)
    for parameter in source.parameters():
        parameter.copy_(parameter.to(torch.bfloat16))
    ids = random_ids(9, seed=0)
    [(expected, _)] = plain_forward(source, [ids])
    assert torch.allclose(Pool(target).forward([Part.chain(0, ids)]).logits, expected, atol=1e-4)


def test_dtype_can_be_chosen(saved_model):
    target = load_target(str(saved_model), device="cpu", dtype="bfloat16")
    assert target.dtype == target.new_cache(1, 4).dtype == torch.bfloat16
    assert load_target(str(saved_model), device="cpu", dtype=torch.float16).dtype == torch.float16


def test_dtype_is_the_checkpoints_own_on_an_accelerator():
    assert target_module.resolve_dtype("auto", torch.device("cuda")) == "auto"
    assert target_module.resolve_dtype("auto", torch.device("cpu")) == torch.float32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"dtype": "float23"}, "float23.*bfloat16"), ({"device": "abacus"}, "abacus"), ({"device": "xpu:77"}, "xpu")],
)
def test_unknown_devices_and_dtypes_are_refused(saved_model, arguments, message):
    with pytest.raises(JetSpecError, match=message):
        load_target(str(saved_model), **arguments)


@pytest.mark.parametrize("name", ["nobody/no-such-model", "./no/such/directory", "no-such-alias"])
def test_unknown_names_say_what_a_name_may_be(name):
    with pytest.raises(JetSpecError, match=r"alias .*smollm2-135m.* hub id, a directory"):
        load_target(name, device="cpu")


def test_a_missing_gguf_file_is_refused():
    with pytest.raises(JetSpecError, match="no GGUF file"):
        load_target("nowhere.gguf", device="cpu")


def gguf_llama():
    return tiny_llama(intermediate_size=64, bos_token_id=256, eos_token_id=256, **LLAMA)


def write_gguf(path: Path) -> None:
    """A float32 GGUF file of `gguf_llama` with the tiny tokenizer, laid out as llama.cpp does."""
    model, tokenizer = gguf_llama(), tiny_tokenizer()
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    tokens += ["zq"] + [f"<|pad{index}|>" for index in range(TEXT_VOCAB_SIZE - len(tokens) - 1)]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3] * 4 + [1] + [3] * (len(tokens) - 261))
    writer.add_token_merges(["z q"])  # a byte-level tokenizer must have a merge
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(256)
    writer.add_chat_template(tokenizer.chat_template)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        gguf_name, array = names.get_name(name, (".weight",)), weight.numpy()
        kind = gguf_name.split(".")[-2]
        if kind in heads:
            halves = array.reshape(heads[kind], 2, array.shape[0] // heads[kind] // 2, array.shape[1])
            array = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
        writer.add_tensor(gguf_name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(file)
    return file


def test_a_gguf_file_is_converted_once_and_gives_the_same_logits(gguf_file, tmp_path, monkeypatch):
    target = load_target(str(gguf_file), device="cpu", cache_dir=str(tmp_path))
    ids = random_ids(9, seed=0)
    [(expected, _)] = plain_forward(gguf_llama(), [ids])
    assert torch.allclose(Pool(target).forward([Part.chain(0, ids)]).logits, expected, atol=1e-4)
    assert target.eos_token_ids == {256}
    assert target.tokenizer.decode(target.tokenizer("hi ü")["input_ids"]) == "hi ü"
    chat = target.tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert chat == "<|user|>x<|end|>"
    assert [entry.name for entry in tmp_path.iterdir()] == [f"tiny-{fingerprint(gguf_file)}"]

    monkeypatch.setattr(target_module, "convert_gguf", lambda *args: pytest.fail("converted again"))
    again = load_target(str(gguf_file), device="cpu", cache_dir=str(tmp_path))
    assert torch.equal(again.model.lm_head.weight, target.model.lm_head.weight)


def test_a_killed_conversion_leaves_no_half_model(gguf_file, tmp_path, monkeypatch):
    def killed(file: Path, directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(target_module, "convert_gguf", killed)
        with pytest.raises(KeyboardInterrupt):
            converted(gguf_file, tmp_path)
    assert list(tmp_path.iterdir()) == []
    # As after a kill that gave no chance to clean up.
    (tmp_path / ".unfinished-abc").mkdir()
    assert (converted(gguf_file, tmp_path) / "model.safetensors").is_file()


def test_of_two_conversions_at_once_the_first_to_finish_stays(gguf_file, tmp_path, monkeypatch):
    def overtaken(file: Path, directory: Path) -> None:
        winner = tmp_path / f"tiny-{fingerprint(gguf_file)}"
        winner.mkdir()
        (winner / "from").write_text("the other")
        (directory / "from").write_text("this one")

    monkeypatch.setattr(target_module, "convert_gguf", overtaken)
    assert (converted(gguf_file, tmp_path) / "from").read_text() == "the other"
    assert len(list(tmp_path.iterdir())) == 1


def test_another_file_of_the_same_name_is_converted_anew(tmp_path):
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    first.write_bytes(b"x" * (3 << 20) + b"1")
    second.write_bytes(b"x" * (3 << 20) + b"2")
    assert fingerprint(first) != fingerprint(second)
    second.write_bytes(first.read_bytes())
    assert fingerprint(first) == fingerprint(second)


def test_a_broken_gguf_file_is_refused(tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"not a model")
    with pytest.raises(JetSpecError, match=r"broken\.gguf"):
        load_target(str(tmp_path / "broken.gguf"), device="cpu", cache_dir=str(tmp_path / "cache"))


@pytest.mark.parametrize("missing", ["gguf", "accelerate"])
def test_missing_packages_name_the_extra(gguf_file, tmp_path, monkeypatch, missing):
    find_spec = target_module.importlib.util.find_spec
    hide = lambda name: None if name == missing else find_spec(name)  # noqa: E731
    monkeypatch.setattr(target_module.importlib.util, "find_spec", hide)
    with pytest.raises(JetSpecError, match=rf"{missing}.*jetspec\[gguf\]"):
        converted(gguf_file, tmp_path)


def test_an_alias_is_the_packaged_file_or_the_hub_id(gguf_file, tmp_path, monkeypatch):
    package = tmp_path / "packaged_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('never imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(target_module.ALIASES, "tiny", Alias("packaged_model", "tiny.gguf", "someone/tiny"))
    assert resolve_source("tiny", tmp_path / "cache") == "someone/tiny"
    (package / "tiny.gguf").write_bytes(gguf_file.read_bytes())
    directory = Path(resolve_source("tiny", tmp_path / "cache"))
    assert (directory / "model.safetensors").is_file()
    assert "packaged_model" not in sys.modules
    monkeypatch.setitem(target_module.ALIASES, "gone", Alias("no_such_package", "tiny.gguf", "someone/gone"))
    assert resolve_source("gone", tmp_path / "cache") == "someone/gone"


def test_converted_targets_lie_beside_the_hub_cache(monkeypatch):
    monkeypatch.setattr(target_module.constants, "HF_HOME", "/somewhere/.cache/huggingface")
    assert target_module.default_cache_dir() == Path("/somewhere/.cache/jetspec/targets")
