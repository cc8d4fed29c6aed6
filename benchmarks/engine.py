#!/usr/bin/env python3
"""Measure the speed of the engine, as ratios within one run. Run nothing else on the machine.

    python benchmarks/engine.py --prompts gsm8k_test.jsonl [--dtype bfloat16] [--json]

The ways of decoding take turns on every prompt, so that a drift of the machine affects all of them alike. The figures
are the speed of plain decoding over transformers' `generate`; the time of a verify forward of n rows over that of one
row; the speed of 8 requests at once over one; and for each draft method and tree budget the speed over plain decoding
and the share of a round outside the target's forward. For automatic budgets, the measured speed is compared with the
prediction of the cost model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from jetspec import LLM, SamplingParams
from jetspec.attention import RowBatch
from jetspec.engine import EngineStep, Observer
from jetspec.head import DraftHead, head_for_target, load_head
from jetspec.models.loading import load_target
from jetspec.models.target import Target
from jetspec.prompts import read_prompts

CONTEXT = 256
ROWS = (1, 8, 16, 32, 64, 128)


@dataclass
class Method(Observer):
    """One way of decoding, with its counts and seconds so far."""

    llm: LLM | None = None
    rounds: list[EngineStep] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    decoded: int = 0
    decoding: bool = False

    def step(self, record: EngineStep) -> None:
        if self.decoding:
            self.rounds.append(record)

    @property
    def rate(self) -> float:
        return self.decoded / self.seconds

    def figures(self, plain: Method) -> dict[str, Any]:
        verify = sum(r.verify_s for r in self.rounds)
        planned = [(r, r.expected_tokens, r.expected_s) for r in self.rounds if r.expected_s and r.expected_tokens]
        figures = {
            "over_plain": self.rate / plain.rate,
            "acceptance_length": self.decoded / len(self.rounds),
            "rows": sum(r.rows for r in self.rounds) / len(self.rounds),
            "outside_target": 1 - verify / self.seconds,
            "identical": self.tokens == plain.tokens,
        }
        if planned:
            expected = sum(tokens for _, tokens, _ in planned) / sum(seconds for _, _, seconds in planned)
            real = sum(r.new_tokens for r, _, _ in planned) / sum(r.total_s for r, _, _ in planned)
            figures["drafted_rounds"] = len(planned) / len(self.rounds)
            figures["real_over_predicted"] = real / expected
        return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m", help="alias, hub id, directory or .gguf file")
    parser.add_argument("--draft", default="smollm2-135m", help="head: alias, hub id or directory")
    parser.add_argument("--prompts", type=Path, required=True, help="texts, or .jsonl with prompt, question or text")
    parser.add_argument("--num-prompts", type=int, default=8, help="number of prompts")
    parser.add_argument("--max-tokens", type=int, default=128, help="maximum tokens of an answer")
    parser.add_argument("--dtype", default="float32", help="number type of target and head")
    parser.add_argument("--budgets", type=int, nargs="*", default=[8, 16, 64], help="rows of a verify forward")
    parser.add_argument("--repeats", type=int, default=7, help="forwards of which a time is the median")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    options = parser.parse_args()

    target = load_target(options.target, dtype=options.dtype)
    texts = read_prompts(options.prompts)[: options.num_prompts]
    prompts = LLM(target, None).encode_prompts(texts)
    # Loading a target replaces the attention of its model, so transformers' attention gets a model of its own.
    baseline = load_target(options.target, dtype=options.dtype).model
    baseline.set_attn_implementation("sdpa")
    head = load_head(options.draft, device=target.device, dtype=target.dtype)

    forwards = forward_seconds(target, options.repeats)
    methods = {"plain": decoder(target)}
    for budget in options.budgets:
        methods[f"tree, budget {budget}"] = decoder(target, head, tree_budget=budget)
    methods["tree, auto"] = decoder(target, head)
    methods["chain, auto"] = decoder(target, head, draft_method="chain")
    methods["n-gram, auto"] = decoder(target, None, draft_method="ngram")
    methods["random head, auto"] = decoder(target, random_head(target, head))
    generate = Method()
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens)
    everyone = [generate, *methods.values()]
    run_turns(everyone, baseline, prompts[:1], SamplingParams(temperature=0, max_tokens=8))
    for method in everyone:  # the first turn was the warm-up
        method.rounds, method.tokens, method.seconds, method.decoded = [], [], 0.0, 0
    run_turns(everyone, baseline, prompts, params)

    plain = methods.pop("plain")
    figures: dict[str, Any] = {
        "dtype": options.dtype,
        "threads": torch.get_num_threads(),
        "one_row_ms": forwards[1] * 1e3,
        "rows_over_one_row": {n: forwards[n] / forwards[1] for n in ROWS},
        "plain_tokens_per_s": plain.rate,
        "plain_over_transformers": plain.rate / generate.rate,
        "eight_at_once_over_one": together_rate(target, prompts, params) / plain.rate,
        "methods": {name: method.figures(plain) for name, method in methods.items()},
    }
    if options.json:
        print(json.dumps(figures))
    else:
        show(figures)


def run_turns(methods: list[Method], baseline: Any, prompts: list[list[int]], params: SamplingParams) -> None:
    """Let every method answer every prompt. Each prompt starts with another method."""
    for number, prompt in enumerate(prompts):
        first = number % len(methods)
        for method in methods[first:] + methods[:first]:
            if method.llm is None:
                time_generate(method, baseline, prompt, params.max_tokens or 1)
            else:
                decode(method, prompt, params)


def decoder(target: Target, draft: DraftHead | None = None, **settings: Any) -> Method:
    method = Method()
    method.llm = LLM(target, draft, enable_prefix_caching=False, observer=method, **settings)
    return method


def random_head(target: Target, like: DraftHead) -> DraftHead:
    """An untrained head of the same shape, whose drafts are not accepted."""
    config = like.config
    return head_for_target(
        target,
        kind=config.kind,
        num_layers=config.num_hidden_layers,
        block_size=config.block_size,
        num_aux_layers=config.num_aux_layers,
        mask_token_id=config.mask_token_id,
        seed=0,
    )


def forward_seconds(target: Target, repeats: int) -> dict[int, float]:
    """Median seconds of a forward of n rows after a context. The row counts take turns."""
    cache = target.new_cache(CONTEXT + max(ROWS), 1)

    def forward(first: int, n: int) -> None:
        target.forward(RowBatch.chains([torch.arange(n)], [torch.arange(first + n)]), cache)

    forward(0, CONTEXT)
    times: dict[int, list[float]] = {n: [] for n in ROWS}
    for _ in range(repeats + 1):
        for n in ROWS:
            times[n].append(seconds(lambda n=n: forward(CONTEXT, n)))
    return {n: statistics.median(t[1:]) for n, t in times.items()}


def decode(method: Method, prompt: list[int], params: SamplingParams) -> None:
    """Answer one prompt. The time leaves out prompt processing."""
    assert method.llm is not None
    engine = method.llm.engine
    sequence = engine.add("timed", prompt, params)
    while engine.has_work and not sequence.is_decoding:
        engine.step()
    method.decoding = True
    method.seconds += seconds(lambda: drain(engine))
    method.decoding = False
    method.tokens.append(sequence.output_ids)
    method.decoded += sequence.metrics.decoded_tokens


def together_rate(target: Target, prompts: list[list[int]], params: SamplingParams) -> float:
    """Tokens per second of eight requests that decode together."""
    llm = LLM(target, None, enable_prefix_caching=False)
    sequences = [llm.engine.add(str(i), prompts[i % len(prompts)], params) for i in range(8)]
    while llm.engine.has_work and not all(s.is_decoding or s.finished for s in sequences):
        llm.engine.step()
    before = sum(s.num_output for s in sequences)
    steps = min(params.max_tokens or 32, 32)
    took = seconds(lambda: [llm.engine.step() for _ in range(steps)])
    return (sum(s.num_output for s in sequences) - before) / took


def time_generate(method: Method, model: Any, prompt: list[int], max_tokens: int) -> None:
    """transformers' greedy `generate`. The time of a run of one token is taken off, for prompt processing."""

    def generate(limit: int) -> tuple[int, float]:
        ids = torch.tensor([prompt])
        start = time.perf_counter()
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False, pad_token_id=0
        )
        return output.shape[1] - len(prompt), time.perf_counter() - start

    (_, first), (number, whole) = generate(1), generate(max_tokens)
    method.decoded += number - 1
    method.seconds += whole - first


def drain(engine: Any) -> None:
    while engine.has_work:
        engine.step()


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
    Console().print(table)
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="cyan")
    for column in ("method", "over plain", "acceptance", "rows", "outside", "real/predicted", "identical"):
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for name, row in figures["methods"].items():
        predicted = row.get("real_over_predicted")
        table.add_row(
            name,
            f"{row['over_plain']:.2f}x",
            f"{row['acceptance_length']:.2f}",
            f"{row['rows']:.1f}",
            f"{row['outside_target']:.0%}",
            "" if predicted is None else f"{predicted:.2f}",
            "yes" if row["identical"] else "no",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
