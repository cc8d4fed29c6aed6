"""Configurations as they are published: what is read of them."""

from __future__ import annotations

from typing import Any

import pytest

from jetspec.head.layouts import read_layout
from tests.helpers.published_heads import dflash

#: Sizes of an 8B model, and what else such files hold.
SIZES: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
BLOCK: dict[str, Any] = {"model_type": "qwen3", "num_hidden_layers": 5, "num_target_layers": 36, "block_size": 16}
OUTPUTS = {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}
EAGLE3 = {"d2t", "t2d", "fc.weight", "lm_head.weight", "norm.weight"}


def test_an_eagle3_config_of_specforge() -> None:
    """Source: sgl-project/SpecForge, configs/qwen3-8b-eagle3.json."""
    data = {**SIZES, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    layout = read_layout({**data, "draft_vocab_size": 32000, "torch_dtype": "bfloat16"}, EAGLE3)
    config = layout.config
    assert (layout.name, config.family, config.draft_vocab_size) == ("SpecForge", "EAGLE-3", 32000)
    assert (config.layer_ids(36), config.num_aux_layers) == ((1, 17, 32), 3)
    assert (config.block_size, config.own_embedding, config.rope_theta) == (9, False, 1e6)


def test_an_eagle3_config_of_the_original_repository() -> None:
    """No head_dim and no base of the angles. Source: SafeAILab/EAGLE, eagle/traineagle3/config.json."""
    data = {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 128000,
        "draft_vocab_size": 32000,
        "eos_token_id": 128001,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 1,
        "num_key_value_heads": 8,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.28.1",
        "use_cache": True,
        "vocab_size": 128256,
    }
    layout = read_layout(data, EAGLE3)
    assert (layout.name, layout.config.head_dim, layout.config.rope_theta) == ("EAGLE", 128, 10000.0)


def test_a_domino_config() -> None:
    """Source: sgl-project/SpecForge, configs/qwen3-8b-domino.json."""
    domino = {"projector_type": "domino", "pure_draft_prefix_len": 1, "emb_dim": 256, "gru_hidden_dim": 1024}
    block = {"emb_dim": 256, "dflash_config": {**OUTPUTS, **domino, "shift_label": True}}
    config = read_layout({**SIZES, **BLOCK, **block, "architectures": ["DominoDraftModel"]}, ()).config
    assert config.correction is not None
    assert (config.correction.rank, config.correction.state_size, config.correction.skip) == (256, 1024, 1)
    assert (config.block_rows, config.block_size, config.causal) == (16, 17, False)
    assert config.to_dict()["block_size"] == 16


def test_a_dspark_config() -> None:
    """Source: sgl-project/SpecForge, configs/qwen3-8b-dspark.json."""
    markov = {"projector_type": "dspark", "markov_rank": 256, "markov_head_type": "vanilla", "attention_mode": "gqa"}
    confidence = {"confidence_head_alpha": 1.0, "confidence_head_with_markov": True, "enable_confidence_head": True}
    data = {**SIZES, **BLOCK, "block_size": 7, "architectures": ["DSparkDraftModel"]}
    config = read_layout({**data, "dflash_config": {**OUTPUTS, **markov, **confidence}}, ()).config
    assert (config.family, config.block_rows, config.block_size) == ("DSpark", 7, 8)


def test_a_dflash2_config() -> None:
    """The block's size lies in dflash_config, and windows see both ways."""
    extra = {"block_size": 8, "conv_group_size": 16, "conv_kernel_size": 2, "selector_rank": 256, "selector_top_k": 16}
    windows = {"use_sliding_window": True, "sliding_window": 2048, "layer_types": ["sliding_attention"] * 5}
    data = {**SIZES, **BLOCK, **windows, "is_causal": False, "architectures": ["DFlash2DraftModel"]}
    del data["block_size"]
    config = read_layout({**data, "dflash_config": {**OUTPUTS, **extra}}, ()).config
    assert (config.family, config.block_rows, config.causal, config.windows) == ("DFlash 2", 8, False, (2048,) * 5)


@pytest.mark.parametrize(("flag", "causal"), [(False, True), (True, False)])
def test_windows_in_the_layout_of_speculators(flag: bool, causal: bool) -> None:
    published = dflash(
        "speculators",
        sliding_window_non_causal=flag,
        transformer_layer_config__use_sliding_window=True,
        transformer_layer_config__sliding_window=4,
        transformer_layer_config__layer_types=["sliding_attention"] * 2,
    )
    config = read_layout(published.config, published.tensors).config
    assert (config.causal, config.windows) == (causal, (4, 4))
