"""Loading a target: by directory, hub id, alias or GGUF file, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from jetspec.errors import JetSpecError
from jetspec.fingerprint import file_fingerprint
from jetspec.models import gguf as gguf_module
from jetspec.models.gguf import CONVERSION_VERSION, converted
from jetspec.models.loading import ALIASES, Alias, load_target, resolve_dtype, resolve_source
from tests.helpers.forest import Part, Pool, plain_forward, random_ids
from tests.helpers.tiny import TEXT_VOCAB_SIZE, tiny_llama, tiny_qwen3, tiny_tokenizer

LLAMA = {"hidden_size": 32, "num_hidden_layers": 4, "head_dim": 8, "vocab_size": TEXT_VOCAB_SIZE}


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
    assert resolve_dtype("auto", torch.device("cuda")) == "auto"
    assert resolve_dtype("auto", torch.device("cpu")) == torch.float32


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


def folder_name(file: Path) -> str:
    return f"{file.stem}-{file_fingerprint(file, salt=CONVERSION_VERSION)[:12]}"


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
    assert [entry.name for entry in tmp_path.iterdir()] == [folder_name(gguf_file)]

    monkeypatch.setattr(gguf_module, "convert_gguf", lambda *_: pytest.fail("converted again"))
    again = load_target(str(gguf_file), device="cpu", cache_dir=str(tmp_path))
    assert torch.equal(again.model.lm_head.weight, target.model.lm_head.weight)


def test_a_killed_conversion_leaves_no_half_model(gguf_file, tmp_path, monkeypatch):
    def killed(_: Path, directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gguf_module, "convert_gguf", killed)
        with pytest.raises(KeyboardInterrupt):
            converted(gguf_file, tmp_path)
    assert list(tmp_path.iterdir()) == []
    # As after a kill that gave no chance to clean up.
    (tmp_path / ".unfinished-abc").mkdir()
    assert (converted(gguf_file, tmp_path) / "model.safetensors").is_file()


def test_of_two_conversions_at_once_the_first_to_finish_stays(gguf_file, tmp_path, monkeypatch):
    def overtaken(_: Path, directory: Path) -> None:
        winner = tmp_path / folder_name(gguf_file)
        winner.mkdir()
        (winner / "from").write_text("the other")
        (directory / "from").write_text("this one")

    monkeypatch.setattr(gguf_module, "convert_gguf", overtaken)
    assert (converted(gguf_file, tmp_path) / "from").read_text() == "the other"
    assert len(list(tmp_path.iterdir())) == 1


def test_another_file_of_the_same_name_is_converted_anew(tmp_path):
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    first.write_bytes(b"x" * (3 << 20) + b"1")
    second.write_bytes(b"x" * (3 << 20) + b"2")
    assert file_fingerprint(first) != file_fingerprint(second)
    assert file_fingerprint(first) != file_fingerprint(first, salt="2")
    second.write_bytes(first.read_bytes())
    assert file_fingerprint(first) == file_fingerprint(second)


def test_a_broken_gguf_file_is_refused(tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"not a model")
    with pytest.raises(JetSpecError, match=r"broken\.gguf"):
        load_target(str(tmp_path / "broken.gguf"), device="cpu", cache_dir=str(tmp_path / "cache"))


@pytest.mark.parametrize("missing", ["gguf", "accelerate"])
def test_missing_packages_name_the_extra(gguf_file, tmp_path, monkeypatch, missing):
    find_spec = gguf_module.importlib.util.find_spec
    hide = lambda name: None if name == missing else find_spec(name)  # noqa: E731
    monkeypatch.setattr(gguf_module.importlib.util, "find_spec", hide)
    with pytest.raises(JetSpecError, match=rf"{missing}.*jetspec\[gguf\]"):
        converted(gguf_file, tmp_path)


def test_an_alias_is_the_packaged_file_or_the_hub_id(gguf_file, tmp_path, monkeypatch):
    package = tmp_path / "packaged_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('never imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(ALIASES, "tiny", Alias("packaged_model", "tiny.gguf", "someone/tiny"))
    assert resolve_source("tiny", tmp_path / "cache") == "someone/tiny"
    (package / "tiny.gguf").write_bytes(gguf_file.read_bytes())
    directory = Path(resolve_source("tiny", tmp_path / "cache"))
    assert (directory / "model.safetensors").is_file()
    assert "packaged_model" not in sys.modules
    monkeypatch.setitem(ALIASES, "gone", Alias("no_such_package", "tiny.gguf", "someone/gone"))
    assert resolve_source("gone", tmp_path / "cache") == "someone/gone"


def test_converted_targets_lie_beside_the_hub_cache(monkeypatch):
    monkeypatch.setattr(gguf_module.constants, "HF_HOME", "/somewhere/.cache/huggingface")
    assert gguf_module.default_cache_dir() == Path("/somewhere/.cache/jetspec/targets")
