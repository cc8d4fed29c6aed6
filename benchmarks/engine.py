#!/usr/bin/env python3
"""How fast the engine is, as ratios taken in one run. Run it with nothing else on the machine.

    python benchmarks/engine.py --prompts gsm8k_test.jsonl [--dtype bfloat16] [--json]

Rows: plain decoding over transformers' `generate`; a verify forward of n rows over one of a single row; the share of a
round that is not the target's forward; throughput of 8 requests at once over one; decoding with the head over plain.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from jetspec import LLM, SamplingParams
from jetspec.attention import RowBatch, Segment
from jetspec.cli.common import encode_prompts, read_prompts
from jetspec.target import Target, load_target

CONTEXT = 256
ROWS = (1, 8, 16, 32, 64, 128)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--draft", default="smollm2-135m")
    parser.add_argument("--prompts", type=Path, required=True, help="texts, or .jsonl with prompt, question or text")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--budgets", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--repeats", type=int, default=7, help="forwards a row count is the median of")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    target = load_target(options.target, dtype=options.dtype)
    texts = read_prompts(options.prompts)[: options.num_prompts]
    prompts = encode_prompts(LLM(target), texts, None)
    # transformers' own attention has to be switched off again, so it gets a model of its own.
    baseline = load_target(options.target, dtype=options.dtype).model
    baseline.set_attn_implementation("sdpa")

    passes = row_passes(target, options.repeats)
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens)
    plain = decode_rate(LLM(target, share_prefixes=False), prompts, params)
    figures: dict[str, Any] = {
        "dtype": options.dtype,
        "threads": torch.get_num_threads(),
        "one_row_ms": passes[1] * 1e3,
        "rows_over_one_row": {n: passes[n] / passes[1] for n in ROWS},
        "plain_tokens_per_s": plain["tokens_per_s"],
        "plain_over_transformers": plain["tokens_per_s"] / generate_rate(baseline, prompts, options.max_tokens),
        "eight_at_once_over_one": together_rate(target, prompts, params) / plain["tokens_per_s"],
        "jetspec": {},
    }
    for budget in options.budgets:
        llm = LLM(target, options.draft, tree_budget=budget, share_prefixes=False)
        rate = decode_rate(llm, prompts, params)
        figures["jetspec"][budget] = {
            "over_plain": rate["tokens_per_s"] / plain["tokens_per_s"],
            "acceptance_length": rate["acceptance_length"],
            "outside_target": rate["outside_target"],
            "identical": rate["tokens"] == plain["tokens"],
        }
    if options.json:
        print(json.dumps(figures))
    else:
        show(figures)


def row_passes(target: Target, repeats: int) -> dict[int, float]:
    """Median seconds of a forward of n rows behind a context, the row counts taken in turn."""
    cache = target.new_cache(CONTEXT + max(ROWS), 1)

    def forward(first: int, n: int) -> None:
        segment = Segment(0, n, first, torch.arange(first + n))
        batch = RowBatch(torch.arange(n), torch.arange(first, first + n), torch.arange(-1, n - 1), [segment])
        target.forward(batch, cache)

    forward(0, CONTEXT)
    times: dict[int, list[float]] = {n: [] for n in ROWS}
    for _ in range(repeats + 1):
        for n in ROWS:
            times[n].append(seconds(lambda n=n: forward(CONTEXT, n)))
    return {n: statistics.median(t[1:]) for n, t in times.items()}


def decode_rate(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> dict[str, Any]:
    """Tokens per second of decoding, prompts one by one, prompt processing left out."""
    forward_s = 0.0
    inner = llm.target.forward

    def timed(*args: Any, **kwargs: Any) -> Any:
        nonlocal forward_s
        start = time.perf_counter()
        output = inner(*args, **kwargs)
        forward_s += time.perf_counter() - start
        return output

    llm.generate([prompts[0]], SamplingParams(temperature=0, max_tokens=8))
    tokens: list[list[int]] = []
    decoded = rounds = 0
    total = 0.0
    for prompt in prompts:
        sequence = llm.engine.add("timed", prompt, params)
        while llm.engine.has_work and not sequence.is_decoding:
            llm.engine.step()
        llm.target.forward = timed  # type: ignore[method-assign]
        total += seconds(lambda: drain(llm))
        del llm.target.forward
        tokens.append(sequence.output_ids)
        decoded += sequence.metrics.decoded_tokens
        rounds += sequence.metrics.rounds
    return {
        "tokens_per_s": decoded / total,
        "acceptance_length": decoded / rounds,
        "outside_target": 1 - forward_s / total,
        "tokens": tokens,
    }


def together_rate(target: Target, prompts: list[list[int]], params: SamplingParams) -> float:
    """Tokens per second of eight requests that decode together."""
    llm = LLM(target, share_prefixes=False)
    sequences = [llm.engine.add(str(i), prompts[i % len(prompts)], params) for i in range(8)]
    while not all(s.is_decoding for s in sequences):
        llm.engine.step()
    before = sum(s.num_output for s in sequences)
    steps = min(params.max_tokens or 32, 32)
    took = seconds(lambda: [llm.engine.step() for _ in range(steps)])
    return (sum(s.num_output for s in sequences) - before) / took


def generate_rate(model: Any, prompts: list[list[int]], max_tokens: int) -> float:
    """Tokens per second of transformers' greedy `generate`, prompt processing left out by a run of one token."""

    def generate(prompt: list[int], limit: int) -> tuple[int, float]:
        ids = torch.tensor([prompt])
        start = time.perf_counter()
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False, pad_token_id=0
        )
        return output.shape[1] - len(prompt), time.perf_counter() - start

    generate(prompts[0], 8)
    runs = [(generate(prompt, 1), generate(prompt, max_tokens)) for prompt in prompts]
    return sum(n - 1 for _, (n, _) in runs) / sum(whole - first for (_, first), (_, whole) in runs)


def drain(llm: LLM) -> None:
    while llm.engine.has_work:
        llm.engine.step()


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def show(figures: dict[str, Any]) -> None:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="cyan")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_row("number type, threads", f"{figures['dtype']}, {figures['threads']}")
    table.add_row("forward of one row", f"{figures['one_row_ms']:.1f} ms")
    for n, ratio in figures["rows_over_one_row"].items():
        table.add_row(f"forward of {n} rows over one row", f"{ratio:.2f}x")
    table.add_row("plain decoding", f"{figures['plain_tokens_per_s']:.1f} tokens/s")
    table.add_row("plain decoding over transformers", f"{figures['plain_over_transformers']:.2f}x")
    table.add_row("8 requests at once over one", f"{figures['eight_at_once_over_one']:.2f}x")
    for budget, row in figures["jetspec"].items():
        same = "same tokens" if row["identical"] else "tokens differ"
        table.add_row(f"JetSpec over plain, budget {budget} ({same})", f"{row['over_plain']:.2f}x")
        table.add_row("  acceptance length", f"{row['acceptance_length']:.2f}")
        table.add_row("  share of a round outside the target", f"{row['outside_target']:.0%}")
    Console().print(table)


if __name__ == "__main__":
    main()
