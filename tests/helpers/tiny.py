"""Tiny random models shared by the tests: seeded, float32, on the CPU, with logits that are not flat."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from jetspec.models.layers import decoder_of

VOCAB_SIZE = 128
TEXT_VOCAB_SIZE = 272  # 256 bytes and 4 special tokens, padded
EOS_TOKEN = "<|end|>"
SPECIAL_TOKENS = [EOS_TOKEN, "<|user|>", "<|assistant|>", "<|system|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

BASE = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def randomize(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Redraw every weight so that activations keep their size through the layers and the argmax varies."""
    generator = torch.Generator().manual_seed(seed)
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter is embedding:
                parameter.copy_(noise * (0.5 / math.sqrt(parameter.shape[-1]) if tied else 1))
            elif parameter.dim() >= 2:
                parameter.copy_(noise * 1.5 / math.sqrt(parameter.shape[-1]))
            else:
                parameter.add_(0.1 * noise)
        if tied:  # small embeddings keep the model from repeating its input; the final norm makes up for it
            final_norm(model).weight.add_(3)
    return model.eval().requires_grad_(False)


def final_norm(model: PreTrainedModel) -> nn.Module:
    """The norm behind the last layer, whatever the family calls it."""
    decoder = decoder_of(model, model.config.get_text_config().num_hidden_layers)
    names = ("norm", "norm_f", "final_layernorm", "embedding_norm")
    [norm] = [child for name, child in decoder.named_children() if name in names]
    return norm


def build(model_class: type, config_class: type, seed: int, attn: str | None, settings: dict) -> PreTrainedModel:
    settings = {"vocab_size": VOCAB_SIZE, **BASE, **settings}
    config = config_class(**settings)
    config._attn_implementation = attn
    config.dtype = torch.float32
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return randomize(model_class(config), seed)


def tiny_llama(seed: int = 0, attn: str | None = "eager", **settings) -> PreTrainedModel:
    return build(LlamaForCausalLM, LlamaConfig, seed, attn, settings)


def tiny_qwen3(seed: int = 0, attn: str | None = "eager", **settings) -> PreTrainedModel:
    return build(Qwen3ForCausalLM, Qwen3Config, seed, attn, {"tie_word_embeddings": True, **settings})


def tiny_qwen3_moe(seed: int = 0, attn: str | None = "eager", **settings) -> PreTrainedModel:
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
    return build(Qwen3MoeForCausalLM, Qwen3MoeConfig, seed, attn, {**moe, **settings})


def tiny_gemma3(seed: int = 0, attn: str | None = "eager", **settings) -> PreTrainedModel:
    """Gemma-3 text: four layers with a sliding window of 8, two with full attention."""
    layer_types = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    gemma = {"sliding_window": 8, "layer_types": layer_types, "query_pre_attn_scalar": 12}
    return build(Gemma3ForCausalLM, Gemma3TextConfig, seed, attn, {**gemma, **settings})


def tiny_gemma2(seed: int = 0, attn: str | None = "eager", **settings) -> PreTrainedModel:
    """Gemma-2: sliding window of 8 in every other layer, soft caps on scores and logits."""
    gemma = {"sliding_window": 8, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 2.0}
    return build(Gemma2ForCausalLM, Gemma2Config, seed, attn, {**gemma, **settings})


def tiny_gpt_oss(seed: int = 0, attn: str | None = "eager", **settings) -> PreTrainedModel:
    """GPT-OSS: attention sinks, sliding window of 8 in every other layer, mixture of experts."""
    layer_types = ["sliding_attention", "full_attention"] * 3
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    oss = {"sliding_window": 8, "layer_types": layer_types, "num_local_experts": 4, "num_experts_per_tok": 2}
    return build(GptOssForCausalLM, GptOssConfig, seed, attn, {**oss, "rope_parameters": rope, **settings})


TINY_MODELS: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": tiny_llama,
    "qwen3": tiny_qwen3,
    "qwen3_moe": tiny_qwen3_moe,
    "gemma3": tiny_gemma3,
}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level: a token for each byte (ids 0 to 255, in their own order), then special tokens; a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS_TOKEN, pad_token=EOS_TOKEN)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL_TOKENS[1:]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_target(kind: str = "llama", *, seed: int = 0, text: bool = False, **settings):
    """A Target around a tiny model; text=True gives it the tiny tokenizer and a vocabulary to match."""
    from jetspec.models.target import Target

    if text:
        settings = {"vocab_size": TEXT_VOCAB_SIZE, **settings}
    model = TINY_MODELS[kind](seed=seed, **settings)
    return Target.from_model(model, tiny_tokenizer() if text else None, name=f"tiny-{kind}")
