"""Heads as others publish them, tiny and random, and what they draft: slow, readable, from the files' content alone."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from jetspec.models.target import Target
from tests.helpers.tiny import tiny_llama, tiny_target

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB, EPS, THETA = 48, 4, 2, 12, 40, 128, 1e-5, 100.0
LAYERS = 8
REDUCED = 40


@cache
def published_target() -> Target:
    """A target of eight layers: EAGLE-3's own choice of layers is 1, 3 and 4."""
    return tiny_target(num_hidden_layers=LAYERS)


@cache
def published_model() -> PreTrainedModel:
    """The model of `published_target`, as transformers runs it."""
    return tiny_llama(num_hidden_layers=LAYERS)


@dataclass
class Published:
    """The files of a head."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    #: What the layout's classes do with them.
    draft: Callable[[Published, Context], Tensor] = field(repr=False)

    def write(self, folder: Path, *, pickled: bool = False) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        if pickled:
            torch.save(self.tensors, folder / "pytorch_model.bin")
        else:
            save_file(self.tensors, folder / "model.safetensors")
        return folder

    def changed(self, **changes: Any) -> Published:
        """Another config; None removes a field, `a__b` reaches into `a`."""
        config = copy.deepcopy(self.config)
        for path, value in changes.items():
            *parents, name = path.split("__")
            place = config
            for parent in parents:
                place = place[parent]
            if value is None:
                del place[name]
            else:
                place[name] = value
        return Published(config, dict(self.tensors), self.draft)


@dataclass
class Context:
    """The committed tokens' hidden states as transformers numbers them, and the tokens from the anchor on."""

    hidden_states: tuple[Tensor, ...]  # [n, HIDDEN] each; 0 is the embedding's
    token_ids: list[int]  # the n committed ones
    path: list[int]  # the anchor first
    embedding: Tensor
    lm_head: Tensor

    def aux(self, numbers: list[int]) -> Tensor:
        return torch.cat([self.hidden_states[number] for number in numbers], dim=-1).double()


class Weights:
    """Random tensors, drawn under names."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, Tensor] = {}

    def matrix(self, name: str, rows: int, columns: int, scale: float = 1.5) -> None:
        self.tensors[name] = torch.randn(rows, columns, generator=self.generator) * scale / math.sqrt(columns)

    def norm(self, name: str, size: int = HIDDEN) -> None:
        self.tensors[name] = 1 + 0.2 * torch.randn(size, generator=self.generator)

    def layer(self, prefix: str, width: int = HIDDEN, *, qk_norm: bool = True) -> None:
        attention = f"{prefix}.self_attn"
        self.matrix(f"{attention}.q_proj.weight", HEADS * HEAD_DIM, width)
        self.matrix(f"{attention}.k_proj.weight", KV_HEADS * HEAD_DIM, width)
        self.matrix(f"{attention}.v_proj.weight", KV_HEADS * HEAD_DIM, width)
        self.matrix(f"{attention}.o_proj.weight", HIDDEN, HEADS * HEAD_DIM)
        self.matrix(f"{prefix}.mlp.gate_proj.weight", MLP, HIDDEN)
        self.matrix(f"{prefix}.mlp.up_proj.weight", MLP, HIDDEN)
        self.matrix(f"{prefix}.mlp.down_proj.weight", HIDDEN, MLP)
        self.norm(f"{prefix}.input_layernorm.weight")
        self.norm(f"{prefix}.post_attention_layernorm.weight")
        for name in ("q_norm", "k_norm") if qk_norm else ():
            self.norm(f"{attention}.{name}.weight", HEAD_DIM)

    def vocabulary(self, size: int) -> None:
        """An lm_head of `size` tokens of the target, and which ones these are."""
        self.matrix("lm_head.weight", size, HIDDEN)
        chosen = torch.randperm(VOCAB, generator=self.generator)[:size].sort().values
        self.tensors["d2t"] = chosen - torch.arange(size)
        self.tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
        self.tensors["t2d"][chosen] = True


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * weight.double()


def rope(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate x [n, heads, head_dim] by its positions."""
    half = HEAD_DIM // 2
    angles = positions[:, None].double() / THETA ** (torch.arange(half).double() / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin), dim=-1)


class Layer:
    """One decoder layer by its prefix."""

    def __init__(self, tensors: dict[str, Tensor], prefix: str) -> None:
        self.tensors, self.prefix = tensors, prefix

    def weight(self, name: str) -> Tensor:
        return self.tensors[f"{self.prefix}.{name}.weight"].double()

    def heads(self, name: str, rows: Tensor) -> Tensor:
        x = (rows @ self.weight(f"self_attn.{name}_proj").T).unflatten(-1, (-1, HEAD_DIM))
        norm = f"{self.prefix}.self_attn.{name}_norm.weight"
        return rms(x, self.tensors[norm]) if norm in self.tensors else x

    def attend(self, queries: Tensor, keys: Tensor, seen: Tensor, q_at: Tensor, k_at: Tensor) -> Tensor:
        """Rows of normalised `queries` attend to rows of normalised `keys` where `seen` [queries, keys]."""
        q, k, v = rope(self.heads("q", queries), q_at), rope(self.heads("k", keys), k_at), self.heads("v", keys)
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(HEAD_DIM)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).flatten(1) @ self.weight("self_attn.o_proj").T

    def mlp(self, y: Tensor) -> Tensor:
        gate = y @ self.weight("mlp.gate_proj").T
        return (gate * gate.sigmoid() * (y @ self.weight("mlp.up_proj").T)) @ self.weight("mlp.down_proj").T


# EAGLE-3


def eagle3(layout: str, seed: int = 0, *, size: int = REDUCED, layers: int = 1, **options: Any) -> Published:
    """An EAGLE-3 head in the layout "EAGLE", "SpecForge" or "speculators"."""
    qk_norm = options.get("transformer_layer_config__model_type", "llama") == "qwen3"
    w = Weights(seed)
    first = "layers.0" if layout == "speculators" else "midlayer"
    w.matrix("fc.weight", HIDDEN, 3 * HIDDEN)
    w.layer(first, 2 * HIDDEN, qk_norm=qk_norm)
    w.norm(f"{first}.hidden_norm.weight")
    for index in range(1, layers):
        w.layer(f"layers.{index}", qk_norm=qk_norm)
    w.norm("norm.weight")
    if size == VOCAB:
        w.matrix("lm_head.weight", VOCAB, HIDDEN)
    else:
        w.vocabulary(size)
    for number in range(3) if options.get("fc_norm") else ():
        w.norm(f"fc_norm.{number}.weight")
    if options.get("norm_before_fc"):
        w.norm("input_norm.weight", 3 * HIDDEN)
    layer_config = llama_config(layers)
    if layout == "speculators":
        config = speculators_config("eagle3", layer_config, size, 4)
    else:
        architecture = {"EAGLE": "LlamaForCausalLM", "SpecForge": "LlamaForCausalLMEagle3"}[layout]
        config = {**layer_config, "architectures": [architecture], "draft_vocab_size": size}
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
        if layout == "EAGLE":
            del config["head_dim"]
    return Published(config, w.tensors, draft_eagle3).changed(**options)


def llama_config(layers: int, kind: str = "llama") -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "rms_norm_eps": EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
        "attention_bias": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        "torch_dtype": "float32",
    }


def speculators_config(kind: str, layer: dict[str, Any], size: int, tokens: int) -> dict[str, Any]:
    return {
        "architectures": [f"{kind}Speculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.5.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "verifier": {"name_or_path": "someone/target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": size,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformers_version": "5.0.0",
    }


def draft_eagle3(head: Published, context: Context) -> Tensor:
    """Log probabilities [VOCAB] of the token behind the path; -inf for tokens that the head does not know."""
    t, config = head.tensors, head.config
    prefix = "layers.0" if "layers.0.hidden_norm.weight" in t else "midlayer"
    numbers = config.get("eagle_aux_hidden_state_layer_ids")
    if numbers is None:
        outputs = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
        numbers = [2, LAYERS // 2, LAYERS - 3] if outputs is None else [layer + 1 for layer in outputs]
    aux = context.aux(numbers)
    if config.get("fc_norm"):
        aux = torch.cat([rms(part, t[f"fc_norm.{i}.weight"]) for i, part in enumerate(aux.chunk(3, -1))], -1)
    if config.get("norm_before_fc"):
        aux = rms(aux, t["input_norm.weight"])
    features = list(aux @ t["fc.weight"].double().T)
    embedding = t.get("embed_tokens.weight", context.embedding).double()
    tokens = [*context.token_ids, *context.path]
    layers = [Layer(t, prefix)] + [
        Layer(t, f"layers.{i}") for i in range(1, 9) if f"layers.{i}.mlp.up_proj.weight" in t
    ]
    for _ in context.path:
        feature, token = torch.stack(features), embedding[torch.tensor(tokens[1 : len(features) + 1])]
        at = torch.arange(len(features))
        seen = at[:, None] >= at
        normed = rms(feature, t[f"{prefix}.hidden_norm.weight"])
        x = normed if config.get("norm_before_residual") else feature
        for index, layer in enumerate(layers):
            y = rms(token if index == 0 else x, layer.weight("input_layernorm"))
            y = torch.cat((y, normed), dim=-1) if index == 0 else y
            x = x + layer.attend(y, y, seen, at, at)
            x = x + layer.mlp(rms(x, layer.weight("post_attention_layernorm")))
        output = rms(x[-1], t["norm.weight"])
        features.append(output if config.get("norm_output") and "speculators_config" in config else x[-1])
    return spread(t, output, context)


def spread(t: dict[str, Tensor], output: Tensor, context: Context, bias: Tensor | float = 0.0) -> Tensor:
    """Log probabilities over the target's tokens, by the head's lm_head and vocabulary or else the target's."""
    logits = t.get("lm_head.weight", context.lm_head).double() @ output + bias
    full = torch.full((VOCAB,), -torch.inf, dtype=torch.float64)
    full[torch.arange(len(logits)) + t.get("d2t", torch.tensor(0))] = logits.log_softmax(-1)
    return full


# Parallel heads

MASK, BLOCK, RANK, STATE, TOP_K = 127, 5, 6, 7, 16
AUX = [2, 5]  # hidden states, as transformers numbers them


def dflash(layout: str, family: str = "DFlash", seed: int = 0, *, size: int = VOCAB, **options: Any) -> Published:
    """A head with a bidirectional block in the layout "DFlash", "DeepSpec" or "speculators"."""
    form = next((value for name, value in options.items() if name.endswith("markov_head_type")), "vanilla")
    w = Weights(seed)
    w.matrix("fc.weight", HIDDEN, len(AUX) * HIDDEN)
    w.norm("hidden_norm.weight")
    w.norm("norm.weight")
    for index in range(2):
        w.layer(f"layers.{index}")
    if layout != "DFlash" and size == VOCAB:
        w.matrix("lm_head.weight", VOCAB, HIDDEN)
    elif size != VOCAB:
        w.vocabulary(size)
    if layout == "DeepSpec":
        w.matrix("embed_tokens.weight", VOCAB, HIDDEN, scale=HIDDEN**0.5)
    if family == "Domino":
        w.matrix("prefix_gru.weight_ih_l0", 3 * STATE, HIDDEN, scale=3)
        w.matrix("prefix_gru.weight_hh_l0", 3 * STATE, STATE)
        w.matrix("embed_proj.0.weight", RANK, HIDDEN + STATE, scale=3)
        w.matrix("embed_proj.2.weight", size, RANK, scale=3)
    if family == "DSpark":
        w.matrix("markov_head.markov_w1.weight", VOCAB, RANK, scale=RANK**0.5)
        w.matrix("markov_head.markov_w2.weight", size, RANK, scale=3)
        w.matrix("confidence_head.proj.weight", 1, HIDDEN + RANK)
        for name, rows, columns in {
            "gated": [("gate_proj", RANK, HIDDEN + RANK)],
            "rnn": [("joint_proj", 3 * RANK, HIDDEN + 2 * RANK)],
        }.get(form, []):
            w.matrix(f"markov_head.{name}.weight", rows, columns)
            w.matrix(f"markov_head.{name}.bias", rows, 1)
            w.tensors[f"markov_head.{name}.bias"].squeeze_(1)
    if family == "DFlash 2":
        w.matrix("candidate_selector.predecessor_codebook", VOCAB, RANK, scale=RANK**0.5)
        w.matrix("candidate_selector.successor_codebook", VOCAB, RANK, scale=RANK**0.5)
        w.matrix("candidate_selector.hidden_projection.weight", RANK, HIDDEN)
        for index in range(2):
            for conv in ("attention_conv", "mlp_conv"):
                name = f"layers.{index}.{conv}"
                w.matrix(f"{name}.kernel_projection.weight", 2 * 2 * (HIDDEN // 4), HIDDEN, scale=0.3)
                w.tensors[f"{name}.base_kernel"] = torch.randn(2, 2, HIDDEN, generator=w.generator)
    return Published(dflash_config(layout, family, size), w.tensors, draft_dflash).changed(**options)


def dflash_config(layout: str, family: str, size: int) -> dict[str, Any]:
    layer = llama_config(2, "qwen3")
    outputs = {"mask_token_id": MASK, "target_layer_ids": [number - 1 for number in AUX]}
    domino = {"emb_dim": RANK, "gru_hidden_dim": STATE, "pure_draft_prefix_len": 1, "shift_label": True}
    markov = {"markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True}
    markov |= {"confidence_head_with_markov": True}
    convolutions = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": RANK, "selector_top_k": TOP_K}
    extra = {"Domino": domino, "DSpark": markov, "DFlash 2": convolutions}.get(family, {})
    if layout == "speculators":
        kind = {"DFlash": "dflash", "DSpark": "dspark", "DFlash 2": "dflash2"}[family]
        own = {"aux_hidden_state_layer_ids": AUX, "mask_token_id": MASK, "block_size": BLOCK}
        own |= {"sample_from_anchor": family == "DSpark", "sliding_window_non_causal": False}
        return speculators_config(kind, layer, size, BLOCK - 1) | own | extra
    config = {**layer, "block_size": BLOCK, "num_target_layers": LAYERS}
    if layout == "DeepSpec":
        return {**config, **outputs, **extra, "architectures": ["Qwen3DSparkModel"], "num_anchors": 8}
    name = {"DFlash": "DFlash", "Domino": "Domino", "DSpark": "DSpark", "DFlash 2": "DFlash2"}[family]
    projector = {"projector_type": family.lower()} if family in ("Domino", "DSpark") else {}
    own = {"architectures": [f"{name}DraftModel"], "is_causal": False}
    return {**config, **own, "dflash_config": {**outputs, **extra, **projector}}


def convolve(t: dict[str, Tensor], name: str, x: Tensor, source: Tensor, side: int) -> Tensor:
    """Rows x [B, HIDDEN] of one block, with the kernels that `source` gives; position i reads i and i - 1."""
    dynamic = (source @ t[f"{name}.kernel_projection.weight"].double().T).view(len(x), 2, 2, -1)[:, side]
    output = torch.zeros_like(x)
    for i in range(len(x)):
        for tap in range(min(2, i + 1)):
            kernel = t[f"{name}.base_kernel"][side, tap].double() + dynamic[i, tap].repeat_interleave(4)
            output[i] += kernel * x[i - tap]
    return output


def block_hidden(head: Published, context: Context, options: dict[str, Any]) -> Tensor:
    """What the layers give for every row of the block [BLOCK, HIDDEN]."""
    t = head.tensors
    fused = rms(context.aux(AUX) @ t["fc.weight"].double().T, t["hidden_norm.weight"])
    embedding = t.get("embed_tokens.weight", context.embedding).double()
    x = embedding[torch.tensor([context.path[0]] + [MASK] * (BLOCK - 1))] * options.get("input_embedding_scale", 1)
    n = len(fused)
    at = torch.arange(n + BLOCK)
    seen = torch.ones(BLOCK, n + BLOCK, dtype=torch.bool)
    for index in range(2):
        layer, convolved = Layer(t, f"layers.{index}"), f"layers.{index}.attention_conv.base_kernel" in t
        y = rms(x, layer.weight("input_layernorm"))
        for name in ("attention_conv", "mlp_conv"):
            source, conv = y, f"layers.{index}.{name}"
            y = convolve(t, conv, y, source, 0) if convolved else y
            attends = name == "attention_conv"
            y = layer.attend(y, torch.cat((fused, y)), seen, at[n:], at) if attends else layer.mlp(y)
            x = x + (convolve(t, conv, y, source, 1) if convolved else y)
            y = rms(x, layer.weight("post_attention_layernorm"))
    return rms(x, t["norm.weight"])


def gru(t: dict[str, Tensor], inputs: list[Tensor]) -> Tensor:
    state = torch.zeros(STATE, dtype=torch.float64)
    w_in, w_state = t["prefix_gru.weight_ih_l0"].double(), t["prefix_gru.weight_hh_l0"].double()
    for x in inputs:
        (r_x, z_x, n_x), (r_h, z_h, n_h) = (w_in @ x).chunk(3), (w_state @ state).chunk(3)
        reset, update = (r_x + r_h).sigmoid(), (z_x + z_h).sigmoid()
        state = (1 - update) * (n_x + reset * n_h).tanh() + update * state
    return state


def markov_bias(t: dict[str, Tensor], form: str, path: list[int], rows: list[Tensor]) -> Tensor:
    """The bias of the token behind the path; rows[k] is what the layers give for the token behind path[: k + 1]."""
    m = {name.removeprefix("markov_head."): tensor.double() for name, tensor in t.items()}
    newest = m["markov_w1.weight"][path[-1]]
    if form == "gated":
        gate = m["gate_proj.weight"] @ torch.cat((rows[-1], newest)) + m["gate_proj.bias"]
        newest = gate.sigmoid() * newest
    if form == "rnn":
        state = torch.zeros(RANK, dtype=torch.float64)
        for token, row in zip(path, rows, strict=True):
            joint = m["joint_proj.weight"] @ torch.cat((state, m["markov_w1.weight"][token], row))
            gate, candidate, output = (joint + m["joint_proj.bias"]).chunk(3)
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
        newest = output.tanh()
    return m["markov_w2.weight"] @ newest


def draft_dflash(head: Published, context: Context) -> Tensor:
    """Log probabilities [VOCAB] of the token behind the path; -inf for tokens that the head does not know."""
    t, config, depth = head.tensors, head.config, len(context.path)
    options = config.get("dflash_config", config)
    shifted = config.get("sample_from_anchor", "markov_rank" in options or options.get("shift_label", False))
    if depth > BLOCK - 1 + shifted:
        return torch.full((VOCAB,), -torch.inf, dtype=torch.float64)  # no such row
    hidden = block_hidden(head, context, options)
    rows = list(hidden if shifted else hidden[1:])[:depth]
    bias: Tensor | float = 0.0
    if "emb_dim" in options and depth > options["pure_draft_prefix_len"]:
        state = gru(t, list(context.embedding[torch.tensor(context.path)].double()))
        inner = t["embed_proj.0.weight"].double() @ torch.cat((rows[-1], state))
        bias = t["embed_proj.2.weight"].double() @ (inner * inner.sigmoid())
    if "markov_rank" in options:
        bias = markov_bias(t, options["markov_head_type"], context.path, rows)
    if "selector_rank" in options:
        return selected(t, options, context, rows[-1])
    return spread(t, rows[-1], context, bias)


def selected(t: dict[str, Tensor], options: dict[str, Any], context: Context, row: Tensor) -> Tensor:
    s = {name.removeprefix("candidate_selector."): tensor.double() for name, tensor in t.items()}
    logits = t.get("lm_head.weight", context.lm_head).double() @ row * options.get("output_multiplier", 1)
    cap = options.get("final_logit_softcapping")
    logits = logits if cap is None else (logits / cap).tanh() * cap
    weighed = s["predecessor_codebook"][context.path[-1]] * (s["hidden_projection.weight"] @ row)
    scores = logits + s["successor_codebook"] @ weighed
    kept = torch.full_like(scores, -torch.inf)
    best = logits.topk(options["selector_top_k"]).indices
    kept[best] = scores[best]
    return kept.log_softmax(-1)
