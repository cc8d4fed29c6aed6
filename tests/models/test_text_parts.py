"""Checkpoints of models that read images, too: their text part is the target, or the refusal says what to use."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from jetspec.errors import JetSpecError
from jetspec.models.loading import load_target
from tests.helpers.forest import Part, Pool, random_ids
from tests.helpers.layers import FAMILIES
from tests.helpers.tiny import BASE, TEXT_VOCAB_SIZE, tiny_qwen3, tiny_tokenizer

#: By family: the family of its text part, and what its vision part is made of.
SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
WHOLES: dict[str, tuple[str, dict[str, Any] | None]] = {
    "gemma3": ("gemma3_text", SMALL),
    "gemma4": ("gemma4_text", None),
    "qwen3_5": ("qwen3_5_text", {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2}),
    "llama4": ("llama4_text", {**SMALL, "vision_output_dim": 48}),
    "step3p7": ("step3p5", None),
}


def whole_model(family: str) -> PreTrainedModel:
    known = AutoConfig.for_model(family)
    text, vision = WHOLES[family]
    own, kinds = FAMILIES.get(text, ({"sliding_window": 8}, ()))
    sizes = {**BASE, **own, "num_hidden_layers": 4, "vocab_size": TEXT_VOCAB_SIZE}
    sizes["vocab_size_per_layer_input"] = TEXT_VOCAB_SIZE
    kind = type(known.get_text_config(decoder=True))
    sizes = {name: value for name, value in sizes.items() if hasattr(kind, name) or name in own}
    if kinds:
        sizes["layer_types"] = [kinds[index % len(kinds)] for index in range(4)]
    if family in ("gemma4", "step3p7"):
        sizes |= {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    parts = {"text_config": {"model_type": text, **sizes}}
    if vision is not None:
        parts["vision_config"] = {"model_type": known.vision_config.model_type, **vision}
    config = AutoConfig.for_model(family, **parts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return model


@pytest.mark.parametrize(
    "family",
    ["gemma4", "qwen3_5", *(pytest.param(f, marks=pytest.mark.slow) for f in ("gemma3", "qwen3_5_moe", "llama4"))],
)
def test_the_text_part_is_the_target(family: str, tmp_path: Path) -> None:
    model = whole_model(family)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    ids = random_ids(21, seed=1)
    reading = model.language_model if family == "llama4" else model  # the whole of it cannot do without an image
    with torch.no_grad():
        expected = reading(input_ids=ids[None]).logits[0]
    target = load_target(str(tmp_path))
    assert type(target.model).__name__.endswith("ForCausalLM")
    assert not any("vision" in name for name, _ in target.model.named_parameters())
    output = Pool(target).forward([Part.chain(0, ids)])
    assert torch.allclose(output.logits, expected, atol=1e-4)


def test_a_text_part_without_a_causal_language_model_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("step3p7").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(JetSpecError, match=r"'step3p5'.*text-only checkpoint"):
        load_target(str(tmp_path))


@pytest.mark.parametrize(
    ("method", "settings", "package"),
    [
        ("gptq", {"bits": 4}, "gptq"),
        ("awq", {"bits": 4}, "gptqmodel"),
        ("bitsandbytes", {"load_in_4bit": True}, "bitsandbytes"),
    ],
)
def test_a_quantized_checkpoint_names_what_it_needs(
    method: str, settings: dict[str, Any], package: str, tmp_path: Path
) -> None:
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    tiny_qwen3(vocab_size=TEXT_VOCAB_SIZE).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, **settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(JetSpecError, match="cannot load target") as refusal:
        load_target(str(tmp_path))
    assert package in str(refusal.value).lower()
