#!/usr/bin/env python3
"""Count the answers that drafting and batching change in half precision, and measure the cost of `batch_invariant`.

    python benchmarks/batch_invariant.py --prompts gsm8k_test.jsonl [--dtype bfloat16] [--json]

Plain decoding answers every prompt alone, greedily and with a seed. Then all prompts are answered together with the
head's trees, and answers that are equal token for token are counted. For times that can be trusted, run nothing else
on the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from jetspec import LLM, SamplingParams
from jetspec.attention import RowBatch, Segment
from jetspec.models.loading import load_target
from jetspec.models.target import Target
from jetspec.prompts import read_prompts

CONTEXT = 256
ROWS = (1, 16, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m", help="alias, hub id, directory or .gguf file")
    parser.add_argument("--draft", default="smollm2-135m", help="head: alias, hub id or directory")
    parser.add_argument("--prompts", type=Path, required=True, help="texts, or .jsonl with prompt, question or text")
    parser.add_argument("--num-prompts", type=int, default=50, help="number of prompts")
    parser.add_argument("--max-tokens", type=int, default=64, help="maximum tokens of an answer")
    parser.add_argument("--dtype", default="bfloat16", help="number type of target and head")
    parser.add_argument("--tree-budget", type=int, default=16, help="rows of a verify forward")
    parser.add_argument("--max-num-seqs", type=int, default=8, help="sequences that decode together")
    parser.add_argument("--temperature", type=float, default=0.7, help="temperature of the answers with a seed")
    parser.add_argument("--repeats", type=int, default=5, help="forwards of which a time is the median")
    parser.add_argument(
        "--only-batch-invariant", action="store_true", help="leave out the runs without batch_invariant"
    )
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    options = parser.parse_args()

    target = load_target(options.target, dtype=options.dtype)
    texts = read_prompts(options.prompts)[: options.num_prompts]
    prompts = LLM(target, None).encode_prompts(texts)
    names = ("batch_invariant",) if options.only_batch_invariant else ("batch_invariant", "default")
    modes = {mode: measure(target, prompts, options, batch_invariant=mode == "batch_invariant") for mode in names}
    figures: dict[str, Any] = {
        "dtype": options.dtype,
        "threads": torch.get_num_threads(),
        "prompts": len(prompts),
        "modes": modes,
    }
    if not options.only_batch_invariant:
        invariant, others = (modes[name]["seconds"] for name in names)
        figures["batch_invariant_over_default"] = {name: invariant[name] / others[name] for name in invariant}
    if options.json:
        print(json.dumps(figures))
    else:
        show(figures)


def measure(
    target: Target, prompts: list[list[int]], options: argparse.Namespace, *, batch_invariant: bool
) -> dict[str, Any]:
    """The number of answers that stay the same with trees in a batch, and the seconds of every step."""
    plain = LLM(target, None, batch_invariant=batch_invariant, enable_prefix_caching=False)
    drafted = LLM(
        target,
        options.draft,
        batch_invariant=batch_invariant,
        tree_budget=options.tree_budget,
        max_num_seqs=options.max_num_seqs,
    )
    equal, seconds = {}, {}
    for name, temperature in (("greedy", 0.0), ("seeded", options.temperature)):
        params = [
            SamplingParams(temperature=temperature, seed=seed, max_tokens=options.max_tokens)
            for seed in range(len(prompts))
        ]
        start = time.perf_counter()
        expected = [plain.generate([prompt], p)[0] for prompt, p in zip(prompts, params, strict=True)]
        middle = time.perf_counter()
        got = drafted.generate(prompts, params)
        seconds |= {f"{name}, plain": middle - start, f"{name}, drafted": time.perf_counter() - middle}
        equal[name] = sum(a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(expected, got, strict=True))
    seconds |= {f"forward of {n} rows": forward_seconds(plain.target, n, options.repeats) for n in ROWS}
    return {"equal": equal, "seconds": seconds}


def forward_seconds(target: Target, n: int, repeats: int) -> float:
    """Median seconds of a forward of a tree of n rows, with three children for each node, after a context."""
    cache = target.new_cache(CONTEXT + max(n, CONTEXT), 1)

    def forward(context: int, parents: list[int]) -> float:
        depths: list[int] = []
        for parent in parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        rows = len(parents)
        batch = RowBatch(
            token_ids=torch.arange(rows),
            positions=context + torch.tensor(depths),
            parents=torch.tensor(parents),
            segments=[Segment(0, rows, context, torch.arange(context + rows))],
        )
        start = time.perf_counter()
        target.forward(batch, cache)
        return time.perf_counter() - start

    forward(0, list(range(-1, CONTEXT - 1)))
    tree = [(row - 1) // 3 if row else -1 for row in range(n)]
    return statistics.median([forward(CONTEXT, tree) for _ in range(repeats + 1)][1:])


def show(figures: dict[str, Any]) -> None:
    """Print the figures as a table."""
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="cyan")
    for column in ("figure", *figures["modes"], "ratio"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for name in ("greedy", "seeded"):
        counts = (f"{mode['equal'][name]} of {figures['prompts']}" for mode in figures["modes"].values())
        table.add_row(f"{name} answers as plain decoding alone gives", *counts)
    for name in figures["modes"]["batch_invariant"]["seconds"]:
        times = (f"{mode['seconds'][name]:.3f} s" for mode in figures["modes"].values())
        ratio = figures.get("batch_invariant_over_default", {}).get(name)
        table.add_row(name, *times, "" if ratio is None else f"{ratio:.2f}x")
    console = Console()
    console.print(f"{figures['dtype']}, threads: {figures['threads']}")
    console.print(table)


if __name__ == "__main__":
    main()
