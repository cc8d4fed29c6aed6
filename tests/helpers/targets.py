"""The table of families in docs/targets.md, made by running a tiny model of each. `python -m tests.helpers.targets`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from transformers import PreTrainedModel

from jetspec.engine import Engine
from jetspec.errors import JetSpecError
from jetspec.head import head_for_target
from jetspec.models.target import Target
from jetspec.sampling import SamplingParams
from jetspec.train import TrainConfig, train
from tests.helpers.decoding import decode
from tests.helpers.drafters import OracleDrafter
from tests.helpers.families import tiny_family
from tests.helpers.forest import Part, Pool, plain_forward, random_ids
from tests.helpers.layers import FAMILIES, tiny_family_model
from tests.helpers.tiny import TEXT_VOCAB_SIZE, tiny_tokenizer
from tests.helpers.training import SETTINGS

MOE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
PLAIN = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "smollm3", "exaone4", "gpt2"),
    *("ernie4_5", "ernie4_5_moe", "granite", "granitemoe", "olmo3", "seed_oss", "glm4", "cohere2", "starcoder2"),
    *("gpt_neox", "opt", "lfm3"),
)
#: Settings of families that need any beside the common sizes.
OTHERS: dict[str, dict[str, object]] = {
    **{family: {} for family in PLAIN},
    "qwen3_moe": {**MOE, "num_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {**MOE, "n_routed_experts": 4, "first_k_dense_replace": 1},
}
REFUSED = ("kimi_linear", "minimax", "deepseek_v32", "deepseek_v4", "longcat_flash", "jamba", "stablelm", "nemotron")
NOTES = {
    "deepseek_v2": "multi-head form of latent attention; V2",
    "deepseek_v3": "multi-head form of latent attention; V3, R1, Kimi K2",
    "glm4_moe_lite": "multi-head form of latent attention; GLM-4.7-Flash",
    "glm4_moe": "GLM-4.5 to 4.7",
    "llama4_text": "attention in chunks; Llama 4",
    "gemma4_text": "layers of two head sizes, shared keys and values; Gemma 4",
    "qwen3_next": "gated delta rule",
    "qwen3_5_text": "gated delta rule; Qwen3.5 and 3.6",
    "qwen3_5_moe_text": "gated delta rule; Qwen3.5 and 3.6 MoE",
    "olmo_hybrid": "gated delta rule",
    "nemotron_h": "Mamba-2; Nemotron-H and Nemotron 3",
    "granitemoehybrid": "Mamba-2; Granite 4",
    "falcon_h1": "Mamba-2 beside attention in every layer",
    "bamba": "Mamba-2",
    "lfm2": "short convolutions",
    "lfm2_moe": "short convolutions",
    "lfm3": "short convolutions",
}


def build(family: str) -> PreTrainedModel:
    if family in FAMILIES:
        extra = {"vocab_size_per_layer_input": TEXT_VOCAB_SIZE} if family == "gemma4_text" else {}
        return tiny_family_model(family, vocab_size=TEXT_VOCAB_SIZE, **extra)
    settings = OTHERS.get(family, {"partial_rotary_factor": 0.5} if family in ("stablelm", "nemotron") else {})
    return tiny_family(family, vocab_size=TEXT_VOCAB_SIZE, **settings)


def row(family: str) -> str:
    """One row of the table; what is claimed in it has just been seen."""
    try:
        target = Target.from_model(build(family), tiny_tokenizer(), name=family)
    except JetSpecError as error:
        reason = str(error).split("not supported as a target: ")[-1].split(". Use a target")[0]
        return f"| `{family}` | no | no | no | | {reason} |"
    target.eos_token_ids = frozenset()
    model, ids = build(family), random_ids(21, seed=1)
    [(expected, _)] = plain_forward(model, [ids])
    difference = (Pool(target).forward([Part.chain(0, ids)]).logits - expected).abs().max()
    exact = "yes" if float(difference) < 1e-3 else "no"
    decodes, drafts = (_equals_plain_decoding(target, model, ids.tolist(), drafted) for drafted in (False, True))
    return f"| `{family}` | {decodes} | {drafts} | {_trains(target)} | {exact} | {NOTES.get(family, '')} |"


def _equals_plain_decoding(target: Target, model: PreTrainedModel, prompt: list[int], drafted: bool) -> str:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    truth, _ = decode(model, prompt, params, frozenset(), 0)
    drafter = OracleDrafter({tuple(prompt): truth}, TEXT_VOCAB_SIZE) if drafted else None
    engine = Engine(target, drafter, tree_budget=12, num_blocks=32, kv_block_size=4)
    sequence = engine.add("0", prompt, params)
    engine.run()
    return "yes" if sequence.output_ids == truth else "no"


def _trains(target: Target) -> str:
    try:
        head_for_target(target, num_layers=1, block_size=4, target_layer_ids=(1, 2), mask_token_id=0, init="target")
        init, answer = "target", "yes"
    except JetSpecError:
        init, answer = "random", "with `init: random`"
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"question": f"add {i} to 3"}) + "\n" for i in range(8)))
        small = {"eval_prompts": 0, "max_prompts": 6, "max_steps": 2, "num_layers": 1, "target_layer_ids": (1, 2)}
        config = TrainConfig(**{**SETTINGS, **small, "prompts": prompts, "output": Path(folder) / "head", "init": init})
        losses: list[float] = []
        try:
            train(config, target=target, watch=lambda info: losses.append(info.loss))
        except JetSpecError as error:
            return f"no: {error}".split(", which")[0].replace("no: target:", "no:")
    return answer if losses and torch.tensor(losses).isfinite().all() else "no"


def table() -> str:
    """The whole table, in Markdown."""
    head = [
        "| family | decodes | drafts trees | trains | exact in float32 | notes |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*head, *(row(family) for family in (*sorted({*OTHERS, *FAMILIES}), *REFUSED))]) + "\n"


if __name__ == "__main__":
    print(table(), end="")
