"""Fresh heads for a target: sizes follow the target, weights follow the seed or the target."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import GemmaConfig, GemmaForCausalLM

from jetspec.errors import JetSpecError
from jetspec.head import copy_weights, head_for_target, new_head
from jetspec.models.target import Target
from tests.helpers.families import tiny_family
from tests.helpers.tiny import TINY_MODELS, build, tiny_target

OPTIONS = {"num_layers": 2, "block_size": 4, "mask_token_id": 127}


@pytest.mark.parametrize("kind", sorted(TINY_MODELS))
def test_fits_every_target_family(kind):
    target = tiny_target(kind)
    head = head_for_target(target, num_aux_layers=3, **OPTIONS)
    head.config.validate_for(target)
    config = head.config
    assert (config.hidden_size, config.head_dim, config.num_attention_heads, config.num_key_value_heads) == (
        48,
        12,
        4,
        2,
    )
    assert config.target_layer_ids == (1, 2, 3)
    assert config.causal
    assert not config.shifted
    context = head.context(torch.randn(5, 3 * 48))
    hidden = head.forward_train(context, target.embed(torch.tensor([[3, 127, 127, 127]])), torch.tensor([2]))
    assert torch.isfinite(target.lm_head(hidden)).all()


def test_random_weights_follow_the_seed():
    target = tiny_target()
    first, again, other = (head_for_target(target, num_aux_layers=2, seed=seed, **OPTIONS) for seed in (1, 1, 2))
    for (name, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters()):
        assert torch.equal(a, b)
        assert name.endswith("norm.weight") or not torch.equal(a, c)
    assert first.fc.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_global_random_state_is_untouched():
    target = tiny_target()
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    head_for_target(target, num_aux_layers=2, init="target", **OPTIONS)
    assert torch.equal(torch.rand(3), wanted)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_weights_of_the_targets_last_layers(kind):
    target = tiny_target(kind)
    head = head_for_target(target, num_aux_layers=2, init="target", **OPTIONS)
    source = target.model.get_decoder().state_dict()
    copied = 0
    for name, tensor in head.state_dict().items():
        number, _, rest = name.removeprefix("layers.").partition(".")
        origin = f"layers.{int(number) + 4}.{rest}" if name.startswith("layers.") else name
        if origin in source:
            assert torch.equal(tensor, source[origin]), name
            copied += 1
    assert copied == 1 + 2 * (9 if kind == "llama" else 11)
    scales = torch.stack([source[f"layers.{layer}.input_layernorm.weight"] for layer in (4, 5)])
    aux_hidden_states = torch.randn(3, 2 * 48)
    last = aux_hidden_states[:, 48:]
    normed = last / (last.square().mean(1, keepdim=True) + head.config.rms_norm_eps).sqrt()
    assert torch.allclose(head.context(aux_hidden_states), normed * scales.mean(0), atol=1e-5)


def test_mixture_of_experts_gives_its_attention_only():
    target = tiny_target("qwen3_moe")
    head = head_for_target(target, num_aux_layers=2, init="target", **OPTIONS)
    source = target.model.get_decoder().layers[-1]
    assert torch.equal(head.layers[-1].self_attn.q_proj.weight, source.self_attn.q_proj.weight)
    assert head.layers[-1].mlp.up_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_copied_norms_scale_as_the_targets_do():
    """Gemma stores a norm's scale minus one."""
    target = Target.from_model(build(GemmaForCausalLM, GemmaConfig, 0, "eager", {}))
    head = head_for_target(target, num_aux_layers=2, init="target", **OPTIONS)
    x, norm = torch.randn(3, 48), target.model.get_decoder().norm
    assert torch.allclose(head.norm(x), norm(x), atol=1e-5)


def test_targets_weights_stay_frozen_and_apart():
    target = tiny_target()
    head = head_for_target(target, num_aux_layers=2, init="target", **OPTIONS)
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    with torch.no_grad():
        for parameter in head.parameters():
            assert parameter.requires_grad
            parameter.add_(1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.model.state_dict().items())


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("llama", {}, "either num_aux_layers or target_layer_ids"),
        ("llama", {"num_aux_layers": 2, "target_layer_ids": [1, 2]}, "either num_aux_layers or target_layer_ids"),
        ("llama", {"target_layer_ids": [1, 6]}, r"target_layer_ids=.*must lie in 0\.\.5"),
        ("llama", {"num_aux_layers": 2, "mask_token_id": 128}, "mask_token_id is 128"),
        ("llama", {"num_aux_layers": 2, "init": "zeros"}, "init must be 'random' or 'target'"),
        ("llama", {"num_aux_layers": 2, "init": "target", "num_layers": 7}, "has only 6 layers"),
        ("gemma3", {"num_aux_layers": 2, "init": "target"}, "use init='random'"),
    ],
)
def test_options_that_do_not_fit_are_named(kind, options, message):
    with pytest.raises(JetSpecError, match=message):
        head_for_target(tiny_target(kind), **{**OPTIONS, **options})


@pytest.mark.parametrize("kind", ["parallel", "autoregressive"])
@pytest.mark.parametrize(
    ("family", "eps"),
    [
        ("gpt_neox", 1e-5),
        ("starcoder2", 1e-5),
        ("olmo", 1e-6),
        ("cohere", 1e-5),
        ("cohere2", 1e-5),
        ("phi", 1e-5),
        ("persimmon", 1e-5),
        ("gpt2", 1e-5),
        ("gptj", 1e-5),
        ("codegen", 1e-5),
        ("gpt_bigcode", 1e-5),
        ("opt", 1e-6),
        ("biogpt", 1e-12),
        ("olmo2", 1e-5),
        ("glm", 1.5625e-07),
    ],
)
def test_a_head_is_made_for_families_that_name_their_fields_otherwise(family, eps, kind):
    target = Target.from_model(tiny_family(family), name=family)
    options = {"num_layers": 1, "block_size": 4, "num_aux_layers": 2, "kind": kind}
    head = head_for_target(target, **options, mask_token_id=127 if kind == "parallel" else None)
    config = head.config
    assert config.rms_norm_eps == eps
    assert (config.hidden_size, config.num_attention_heads, config.num_target_layers) == (48, 4, 6)
    assert config.max_position_embeddings == target.max_context
    config.validate_for(target)
    hidden = head.forward_text(torch.randn(8, 96), torch.arange(12), torch.tensor([2, 7]), target.embed)
    assert target.lm_head(hidden).isfinite().all()


@pytest.mark.parametrize("family", ["gpt_neox", "starcoder2", "olmo", "cohere", "phi", "gpt2", "opt"])
def test_weights_are_copied_from_no_family_with_other_norms(family):
    target = Target.from_model(tiny_family(family), name=family)
    with pytest.raises(JetSpecError, match=r"init='target' needs .*use init='random'"):
        head_for_target(target, num_aux_layers=2, init="target", **OPTIONS)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("intermediate_size", [64, 64], "whole number"),
        ("num_key_value_heads", [2, 2], "whole number"),
        ("num_attention_heads", 0, "whole number"),
        ("num_attention_heads", None, "has no num_attention_heads"),
        ("rms_norm_eps", "small", "number above 0"),
        ("rope_parameters", [1], "a mapping"),
        ("max_position_embeddings", None, "has no max_position_embeddings"),
    ],
)
def test_a_config_that_lacks_what_a_head_needs_names_family_and_field(field, value, message):
    target = tiny_target("llama")
    target.config = SimpleNamespace(**{**target.config.to_dict(), "model_type": "odd", field: value})
    with pytest.raises(JetSpecError, match=rf"this odd model has .*{field}.*{message}|this odd model {message}"):
        head_for_target(target, num_aux_layers=2, **OPTIONS)


def test_a_head_of_another_vocabulary_size_can_be_trained_further():
    target = tiny_target("llama")
    trained = new_head(head_for_target(target, num_aux_layers=2, **OPTIONS).config.replace(vocab_size=120))
    head = head_for_target(target, num_aux_layers=2, **OPTIONS)
    copy_weights(head, trained)
    assert torch.equal(head.fc.weight, trained.fc.weight)
