"""Seconds of a tree on a hybrid target against an attention-only target of the same size.

    python benchmarks/hybrid.py --rows 16 --context 256

Both are random Qwen3.5 text models that differ in `layer_types` only: three gated-delta layers before every attention
layer, or attention in every layer, with the MLP of the latter widened until the numbers of parameters agree. A round
is a forward over a random tree and the commit of a path of four of its nodes.
"""

from __future__ import annotations

import argparse
import json
import random
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from jetspec.attention import RowBatch, Segment
from jetspec.models.onednn_linear import pack_linears
from jetspec.models.target import Target
from jetspec.recurrent.states import EMPTY_STATE, StateWrite

SIZES = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "max_position_embeddings": 4096,
}
HYBRID = (["linear_attention"] * 3 + ["full_attention"]) * 3
ATTENTION = ["full_attention"] * 12


def build(layer_types: list[str], intermediate_size: int) -> Target:
    """A random target with these layers."""
    config = AutoConfig.for_model("qwen3_5_text", **SIZES, layer_types=layer_types, intermediate_size=intermediate_size)
    torch.manual_seed(0)
    target = Target.from_model(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    pack_linears(target.model)
    return target


def num_parameters(target: Target) -> int:
    """Parameters of the target's model."""
    return sum(parameter.numel() for parameter in target.model.parameters())


def tree(rows: int, context: int, seed: int) -> tuple[RowBatch, list[int]]:
    """A random tree of rows behind a context, and the rows of a path of at most four nodes in it."""
    rng = random.Random(seed)
    parents = [-1, *(rng.randrange(max(0, i - 4), i) for i in range(1, rows))]
    depths = [0] * rows
    for row in range(1, rows):
        depths[row] = depths[parents[row]] + 1
    path, row = [], rows - 1
    while row >= 0:
        path.insert(0, row)
        row = parents[row]
    batch = RowBatch(
        torch.tensor([rng.randrange(SIZES["vocab_size"]) for _ in range(rows)]),
        context + torch.tensor(depths),
        torch.tensor(parents),
        [Segment(0, rows, context, torch.arange(context + rows), 1)],
    )
    return batch, path[:4]


@torch.inference_mode()
def seconds(target: Target, rows: int, context: int, rounds: int) -> list[float]:
    """Seconds of each round, forward and commit."""
    cache = target.new_cache(context + rows, 1)
    prompt = torch.arange(context) % SIZES["vocab_size"]
    target.forward(RowBatch.chains([prompt], [torch.arange(context)]), cache, torch.empty(0, dtype=torch.int64))
    if cache.states is not None:
        cache.states.commit([StateWrite(EMPTY_STATE, list(range(context)), 1)])
    found = []
    for index in range(rounds + 3):
        batch, path = tree(rows, context, index)
        began = time.perf_counter()
        target.forward(batch, cache)
        cache.move(torch.tensor(path) + context, torch.arange(context, context + len(path)))
        if cache.states is not None:
            cache.states.commit([StateWrite(1, path, 1)])
        found.append(time.perf_counter() - began)
    return found[3:]


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    hybrid = build(HYBRID, 1024)
    attention = build(ATTENTION, 1024)
    missing = num_parameters(hybrid) - num_parameters(attention)
    attention = build(ATTENTION, 1024 + round(missing / (3 * SIZES["hidden_size"] * len(ATTENTION))))
    results = {}
    for rows in options.rows:
        times = {
            name: sorted(seconds(target, rows, options.context, options.rounds))[options.rounds // 2]
            for name, target in (("hybrid", hybrid), ("attention", attention))
        }
        results[rows] = {**times, "ratio": times["hybrid"] / times["attention"]}
    sizes = {"hybrid": num_parameters(hybrid), "attention": num_parameters(attention)}
    print(
        json.dumps(
            {
                "parameters": sizes,
                "context": options.context,
                "threads": torch.get_num_threads(),
                "median_seconds_by_rows": results,
                "state_bytes": hybrid.state_bytes,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
