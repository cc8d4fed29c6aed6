"""Reading and writing the published config, and what it refuses."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

from jetspec.engine.drafters import head_drafter
from jetspec.errors import JetSpecError
from jetspec.head import HeadConfig, head_for_target
from tests.helpers.tiny import tiny_target
from tests.helpers.tiny_head import WINDOWED, tiny_config

PUBLISHED: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": 16,
    "bos_token_id": 151643,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33], "causal_head": True},
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

SHIPPED = Path(__file__).parents[2] / "jetspec" / "heads" / "smollm2-135m"


def published(**changes: Any) -> dict[str, Any]:
    """The published config with changes; a value of None removes the field, `a__b` reaches into `a`."""
    data = copy.deepcopy(PUBLISHED)
    for path, value in changes.items():
        *parents, name = path.split("__")
        place = data
        for parent in parents:
            place = place[parent]
        if value is None:
            place.pop(name, None)
        else:
            place[name] = value
    return data


def refused(message: str, data: dict[str, Any], **options: Any) -> None:
    with pytest.raises(JetSpecError, match=message):
        HeadConfig.from_dict(data, **options)


def test_reads_a_published_config():
    config = HeadConfig.from_dict(PUBLISHED)
    assert config.target_layer_ids == (1, 9, 17, 25, 33)
    assert (config.mask_token_id, config.block_size, config.num_target_layers) == (151669, 16, 36)
    assert (config.hidden_size, config.head_dim, config.num_key_value_heads) == (4096, 128, 8)
    assert config.rope_theta == 1e6
    assert config.causal is True
    assert config.shifted is False
    assert config.windows == (None,) * 5


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shifted", [True, False])
def test_roundtrip(causal, shifted):
    yarn = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 64}
    for extra in ({}, WINDOWED, {"rope_parameters": yarn}, {"attention_bias": True}):
        config = tiny_config(causal=causal, shifted=shifted, **extra)
        assert HeadConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("causal", [True, False])
def test_all_three_causality_flags_are_written(causal):
    data = tiny_config(causal=causal).to_dict()
    assert data["is_causal"] is causal
    assert data["dflash_config"]["causal"] is causal
    assert data["dflash_config"]["causal_head"] is causal


def test_transformers_reads_what_is_written():
    rope = {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}
    read = Qwen3Config.from_dict(tiny_config(rope_parameters=rope, **WINDOWED).to_dict())
    assert read.rope_parameters == rope
    assert read.layer_types == ["sliding_attention", "full_attention"]
    assert read.sliding_window == 4


@pytest.mark.parametrize("flag", ["is_causal", "dflash_config__causal", "dflash_config__causal_head"])
@pytest.mark.parametrize("value", [True, False])
def test_any_one_causality_flag_is_enough(flag, value):
    data = published(dflash_config__causal_head=None)
    *parent, name = flag.split("__")
    (data["dflash_config"] if parent else data)[name] = value
    assert HeadConfig.from_dict(data).causal is value
    assert HeadConfig.from_dict(data, causal=value).causal is value
    refused(f"causal={not value}: the head's config says {value}", data, causal=not value)


def test_without_a_flag_the_block_is_as_in_the_publishers_class():
    data = published(dflash_config__causal_head=None)
    assert HeadConfig.from_dict(data).causal is False
    assert HeadConfig.from_dict(data, causal=True).causal is True
    assert HeadConfig.from_dict(data, causal=False).causal is False
    autoregressive = {**data, "architectures": ["AutoregressiveDraftModel"]}
    autoregressive["dflash_config"] = {"target_layer_ids": [1, 9]}
    assert HeadConfig.from_dict(autoregressive).causal is True


@pytest.mark.parametrize("override", [None, True, False])
@pytest.mark.parametrize("other", ["is_causal", "dflash_config__causal"])
def test_contradicting_causality_flags_are_an_error(other, override):
    refused(r"contradicts itself: .*causal_head = True.*causal = False", published(**{other: False}), causal=override)


@pytest.mark.parametrize("value", ["true", 1, 0])
def test_a_causality_flag_must_be_a_bool(value):
    refused("dflash_config.causal_head=.*: must be true or false", published(dflash_config__causal_head=value))


@pytest.mark.parametrize(
    "field",
    [
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "rms_norm_eps",
        "vocab_size",
        "max_position_embeddings",
        "block_size",
        "num_target_layers",
        "rope_theta",
        "dflash_config__mask_token_id",
        "dflash_config__target_layer_ids",
    ],
)
def test_missing_fields_are_errors_never_guesses(field):
    data = published(**{field: None, "pad_token_id": 7})
    refused(f"lacks .*{re.escape(field.replace('__', '.'))}", data)


def test_missing_dflash_config_names_a_field_in_it():
    refused("dflash_config.mask_token_id", published(dflash_config=None, is_causal=True))


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (r"target_layer_ids=\[1, 36\]: must lie in 0\.\.35", {"dflash_config__target_layer_ids": [1, 36]}),
        (r"target_layer_ids\.0=-1: must be at least 0", {"dflash_config__target_layer_ids": [-1, 3]}),
        ("target_layer_ids=.*: must not name a layer twice", {"dflash_config__target_layer_ids": [3, 3]}),
        ("target_layer_ids=.*: must hold at least 1", {"dflash_config__target_layer_ids": []}),
        ("target_layer_ids=5: must be a list", {"dflash_config__target_layer_ids": 5}),
        ("mask_token_id=-1: must be at least 0", {"dflash_config__mask_token_id": -1}),
        ("mask_token_id='<mask>': must be an integer", {"dflash_config__mask_token_id": "<mask>"}),
        ("shifted=1: must be True or False", {"dflash_config__shifted": 1}),
        ("block_size=1: must be at least 2", {"block_size": 1}),
        ("block_size = 16, dflash_config.block_size = 8", {"dflash_config__block_size": 8}),
        ("hidden_size=4096.0: must be an integer", {"hidden_size": 4096.0}),
        ("num_attention_heads=32: .* multiple of num_key_value_heads", {"num_key_value_heads": 5}),
        ("head_dim=127: must be even", {"head_dim": 127}),
        ("rms_norm_eps=0.*: must be above 0", {"rms_norm_eps": 0}),
        ("hidden_act='gelu'", {"hidden_act": "gelu"}),
        ("model_type='llama'", {"model_type": "llama"}),
        ("architectures=", {"architectures": ["LlamaForCausalLM"]}),
        ("layer_types: must name 5 layers .*, not 1", {"layer_types": ["full_attention"]}),
        ("layer_types.0='linear_attention': must be one of", {"layer_types": ["linear_attention"] * 5}),
        ("use_sliding_window", {"layer_types": ["sliding_attention"] * 5, "sliding_window": 64}),
        ("max_window_layers", {"layer_types": None, "use_sliding_window": True, "sliding_window": 64}
         | {"max_window_layers": None}),
        ("rope_type='dynamic': must be one of", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
        ("rope_theta = 10000.0", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
        ("rope_scaling='yarn': must be an object", {"rope_scaling": "yarn"}),
        ("partial_rotary_factor", {"rope_parameters": {"rope_theta": 1000000, "partial_rotary_factor": 0.5}}),
    ],
)  # fmt: skip
def test_invalid_fields_are_named(message, changes):
    refused(message, published(**changes))


def test_old_and_new_rope_fields_read_the_same():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10240}
    old = published(rope_scaling={("type" if k == "rope_type" else k): v for k, v in yarn.items()})
    new = published(rope_theta=None, rope_scaling=None, rope_parameters={**yarn, "rope_theta": 1000000})
    both = published(rope_scaling=yarn, rope_parameters={**yarn, "rope_theta": 1000000})
    configs = [HeadConfig.from_dict(data) for data in (old, new, both)]
    assert configs[0] == configs[1] == configs[2]
    assert configs[0].rope_parameters == {**yarn, "rope_theta": 1000000}


def test_sliding_windows_by_layer_types_and_by_max_window_layers():
    kinds = ["sliding_attention"] * 3 + ["full_attention"] * 2
    data = published(use_sliding_window=True, sliding_window=64, layer_types=kinds)
    assert HeadConfig.from_dict(data).windows == (64, 64, 64, None, None)
    data = published(use_sliding_window=True, sliding_window=64, layer_types=None, max_window_layers=3)
    assert HeadConfig.from_dict(data).windows == (None, None, None, 64, 64)
    assert HeadConfig.from_dict(published(sliding_window=64)).windows == (None,) * 5


def test_head_fits_its_target_and_no_other():
    target = tiny_target("llama")
    settings = {"hidden_size": 48, "num_target_layers": 6, "vocab_size": 128, "mask_token_id": 127}
    tiny_config(**settings).validate_for(target)
    for name, value in {"hidden_size": 32, "num_target_layers": 7, "vocab_size": 129}.items():
        with pytest.raises(JetSpecError, match=rf"{name} is {value}, the target's is (only )?{settings[name]}"):
            tiny_config(**{**settings, name: value}).validate_for(target)
    with pytest.raises(JetSpecError, match="mask_token_id is 128, but the target embeds only 128 tokens"):
        tiny_config(**{**settings, "mask_token_id": 128}).validate_for(target)


def test_a_head_may_have_the_vocabulary_of_the_tokenizer_where_the_target_is_padded():
    target = tiny_target("llama")
    settings = {"hidden_size": 48, "num_target_layers": 6, "mask_token_id": 127}
    tiny_config(**settings, vocab_size=120).validate_for(target)


def test_a_head_on_another_device_than_its_target_is_refused():
    target = tiny_target("llama")
    head = head_for_target(target, num_layers=1, block_size=4, num_aux_layers=2, mask_token_id=127)
    head.validate_for(target)
    with pytest.raises(JetSpecError, match=r"device is meta, the target's is cpu: .*head\.to\('cpu'\)"):
        head.to("meta").validate_for(target)
    with pytest.raises(JetSpecError, match="device is meta"):
        head_drafter(head.to("meta")).prepare(target, 2, 4)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layer_types": 5}, "layer_types"),
        ({"architectures": 5}, "architectures"),
        ({"num_hidden_layers": "2", "layer_types": None}, "num_hidden_layers"),
        (
            {"use_sliding_window": True, "sliding_window": 4, "layer_types": None, "max_window_layers": "x"},
            "max_window_layers",
        ),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"use_sliding_window": "yes"}, "use_sliding_window"),
    ],
)
def test_fields_of_the_wrong_type_are_named(changes: dict, field: str) -> None:
    data = HeadConfig.from_dict(json.loads((SHIPPED / "config.json").read_text())).to_dict()
    with pytest.raises(JetSpecError, match=field):
        HeadConfig.from_dict({**data, **changes})


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 1000000, **fields}


@pytest.mark.parametrize("place", ["top level", "rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("value", [0.25, 0.5])
def test_a_partial_rotation_is_refused_wherever_it_stands(place: str, value: float) -> None:
    data = published()
    if place != "top level":
        data[place] = rope("default")
    (data if place == "top level" else data[place])["partial_rotary_factor"] = value
    refused("partial_rotary_factor=.*must be 1", data)


@pytest.mark.parametrize("place", ["top level", "rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("scaled_in", ["rope_parameters", "rope_scaling"])
def test_the_original_context_reads_the_same_wherever_it_stands(place: str, scaled_in: str) -> None:
    data = published()
    data[scaled_in] = rope("yarn", factor=4.0)
    if place not in ("top level", scaled_in):
        data[place] = {}
    (data if place == "top level" else data[place])["original_max_position_embeddings"] = 10240
    assert HeadConfig.from_dict(data).rope_parameters == rope(
        "yarn", factor=4.0, original_max_position_embeddings=10240
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [("rope_theta", 1e4), ("partial_rotary_factor", 0.5), ("original_max_position_embeddings", 64)],
)
def test_places_that_disagree_are_refused(field: str, value: float) -> None:
    agreed = {"rope_theta": 1000000, "partial_rotary_factor": 1.0, "original_max_position_embeddings": 10240}
    data = published(rope_theta=None)
    data |= {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, **agreed}, **agreed}
    assert HeadConfig.from_dict(data).rope_parameters["factor"] == 4.0
    refused(f"contradicts itself: .*{field} = {value}", {**data, field: value})


def test_a_base_may_be_a_whole_number_in_one_place_and_not_in_another() -> None:
    config = HeadConfig.from_dict(published(rope_scaling=rope("linear", factor=2)))
    assert HeadConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("linear", "factor"),
        ("yarn", "factor"),
        ("llama3", "factor"),
        ("llama3", "low_freq_factor"),
        ("llama3", "high_freq_factor"),
    ],
)
@pytest.mark.parametrize("value", ["missing", None, 0, float("nan"), "2", True])
def test_a_scaled_rotation_needs_its_factors(place: str, kind: str, field: str, value: Any) -> None:
    fields = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {"factor": 4.0}
    assert HeadConfig.from_dict({**PUBLISHED, place: rope(kind, **fields)}).rope_parameters["rope_type"] == kind
    fields[field] = value
    if value == "missing":
        del fields[field]
    message = "is required by rope_type" if value in ("missing", None) else "must be a positive number"
    refused(f"{field}.*{message}", {**PUBLISHED, place: rope(kind, **fields)})


@pytest.mark.parametrize(
    "parameters",
    [
        rope("default", mrope_section=[16, 24, 24]),
        rope("linear", factor=2.0, long_factor=[1.0]),
        {"full_attention": rope("default"), "sliding_attention": rope("default")},
    ],
)
def test_unknown_rotary_fields_are_refused(parameters: dict[str, Any]) -> None:
    refused("is not a field of rope_type", published(rope_parameters=parameters))
