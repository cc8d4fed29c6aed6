"""The target: what it knows of a model, and what it refuses."""

from __future__ import annotations

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

from jetspec.attention.interface import attention_over_rows
from jetspec.errors import JetSpecError
from jetspec.models import target as target_module
from jetspec.models.target import Target, default_target_layer_ids
from tests.helpers.families import tiny_family
from tests.helpers.forest import Part, Pool, plain_forward, random_ids
from tests.helpers.tiny import TEXT_VOCAB_SIZE, tiny_gemma3, tiny_llama, tiny_target, tiny_tokenizer

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

    def fail(*_, **__):
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


@pytest.mark.parametrize("target_layer_ids", [(-1,), (6,), (1, 1), (0, 99)])
def test_unknown_layers_are_refused(target_layer_ids):
    target = tiny_target("llama")
    with pytest.raises(JetSpecError, match="target_layer_ids"):
        target.validate_target_layer_ids(target_layer_ids)
    with pytest.raises(JetSpecError, match="target_layer_ids"):
        Pool(target, target_layer_ids=target_layer_ids).forward([Part.chain(0, random_ids(1, seed=0))])


def test_target_layers_keep_their_order():
    target = tiny_target("llama")
    assert target.validate_target_layer_ids([4, 0]) == (4, 0)


@pytest.mark.parametrize(
    ("layers", "n", "expected"),
    [(36, 5, [1, 9, 17, 25, 33]), (30, 3, [1, 14, 27]), (6, 3, [1, 2, 3]), (6, 1, [3]), (28, 2, [1, 25])],
)
def test_default_target_layers(layers, n, expected):
    assert default_target_layer_ids(layers, n) == expected


@pytest.mark.parametrize(("layers", "n"), [(6, 4), (4, 2), (6, 0)])
def test_too_many_default_target_layers_are_refused(layers, n):
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


def compressed():
    model = tiny_llama()
    model.config.layer_types = ["compressed_attention"] * 6
    return model


def layer_of_another_kind():
    model = tiny_llama()
    attention = model.model.layers[3].self_attn
    attention.forward = lambda hidden_states, **_: (hidden_states.cumsum(1), None)
    return model


def refused_family(family):
    return tiny_family(family, partial_rotary_factor=0.5)


def own_code_fails():
    model = tiny_llama()

    def fail(*_, **__):
        raise RuntimeError("no such buffer")

    model.model.layers[1].mlp.forward = fail
    return model


def no_extra_keywords():
    model = tiny_llama()
    attention = model.model.layers[0].self_attn
    own = attention.forward
    attention.forward = lambda hidden_states, position_embeddings, attention_mask: own(
        hidden_states, position_embeddings, attention_mask
    )
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (tiny_t5, "encoder-decoder"),
        (tiny_mamba, "max_position_embeddings"),
        (lambda: tiny_family("minimax"), "layer 1 .MiniMaxDecoderLayer. reads earlier tokens"),
        (lambda: tiny_gemma3(use_bidirectional_attention=True), "both directions"),
        (sliding_without_a_window, "layer 1 .*sliding_window"),
        (not_causal, "is_causal"),
        (compressed, "compressed_attention"),
        (layer_of_another_kind, "layer 3 .* reads earlier tokens"),
        (lambda: LlamaModel(tiny_llama().config), "lm_head"),
        (
            lambda: refused_family("stablelm"),
            "'stablelm'.*not supported.*attention.*another family",
        ),
        (
            lambda: refused_family("nemotron"),
            "'nemotron'.*not supported.*attention.*another family",
        ),
        (own_code_fails, "'llama'.*not supported.*no such buffer.*another family"),
        (no_extra_keywords, "'llama'.*not supported.*another family"),
    ],
)
def test_models_that_cannot_be_honoured_are_refused_by_name(build, message):
    with pytest.raises(JetSpecError, match=message):
        Target.from_model(build())


def test_a_layer_may_read_no_other_token():
    def build():
        model = tiny_llama()
        model.model.layers[3].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
        return model

    target, ids = Target.from_model(build()), random_ids(9, seed=0)
    [(expected, _)] = plain_forward(build(), [ids])
    assert torch.allclose(Pool(target).forward([Part.chain(0, ids)]).logits, expected, atol=1e-4)


@pytest.mark.parametrize("family", ["stablelm", "nemotron"])
def test_a_refusal_names_nothing_of_the_package(family):
    with pytest.raises(JetSpecError) as refusal:
        Target.from_model(refused_family(family))
    for internal in ("jetspec", "row", "Target.", "forward"):
        assert internal not in str(refusal.value)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"dropout": 0.1}, "dropout"),
        ({"attention_mask": torch.zeros(1)}, "attention_mask"),
        ({"is_causal": False}, "is_causal"),
        ({"row_attention": None}, "Target.forward"),
    ],
)
def test_attention_keywords_that_change_the_result_are_refused(keywords, message):
    x = torch.zeros(1, 2, 3, 4)
    given = {"query": x, "key": x, "value": x, "row_attention": lambda q, *_, **__: q, **keywords}
    with pytest.raises(JetSpecError, match=message):
        attention_over_rows(tiny_llama().model.layers[0].self_attn, **given)
