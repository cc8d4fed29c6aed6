"""`jetspec demo`: three prompts, answered plainly and with JetSpec."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from jetspec.cli.common import (
    DEFAULT_TARGET,
    BudgetOption,
    DeviceOption,
    DraftOption,
    DtypeOption,
    JsonOption,
    TargetOption,
    describe,
    fail,
    load_pair,
    print_json,
    results,
)

if TYPE_CHECKING:
    from jetspec.llm import LLM, RequestOutput

PROMPTS = (
    "A bakery packs its rolls in bags of 8. On Friday it filled 15 bags and had 6 rolls left over. "
    "How many rolls did it bake on Friday?",
    "Nora reads 24 pages of her book every weekday and 40 pages on each day of the weekend. "
    "How many pages does she read in 3 weeks?",
    "A school buys 4 boxes of pencils for $6 each and 3 packs of paper for $9 each. "
    "It pays with a $100 bill. How much change does it get?",
)
WARM_UP = "Count from one to twenty."
WARM_UP_TOKENS = 16


@dataclass
class DemoResult:
    """The demo's closing table. Tokens per second count prompt processing, not loading."""

    plain_tokens_per_s: float
    jetspec_tokens_per_s: float
    speedup: float
    acceptance_length: float
    identical: bool


@dataclass
class Run:
    """All answers of one way of decoding."""

    outputs: list[RequestOutput]
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return sum(o.metrics.completion_tokens for o in self.outputs) / self.seconds

    @property
    def acceptance_length(self) -> float:
        rounds = sum(o.metrics.rounds for o in self.outputs)
        return sum(o.metrics.decoded_tokens for o in self.outputs) / rounds if rounds else 0.0


def demo(
    target: TargetOption = DEFAULT_TARGET,
    draft: DraftOption = None,
    tree_budget: BudgetOption = "auto",
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer.")] = 128,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "auto",
    json: JsonOption = False,
) -> None:
    """Answer three prompts twice, plainly and with JetSpec, and compare."""
    model, head = load_pair(target, draft, device=device, dtype=dtype)
    from jetspec.llm import LLM

    plain, drafted = LLM(model), LLM(model, head, tree_budget=tree_budget)
    if not json:
        results.print(f"[bold]JetSpec demo[/]  {describe(plain)}, tree budget {tree_budget}", highlight=False)
    for llm in (plain, drafted):
        answer(llm, WARM_UP, min(max_tokens, WARM_UP_TOKENS), stream=False)
    runs = (Run([]), Run([]))
    for number, prompt in enumerate(PROMPTS, 1):
        if not json:
            results.print(f"\n[bold]{number}/{len(PROMPTS)}[/] {prompt}", highlight=False)
        for title, llm, run in zip(("plain decoding", "with JetSpec"), (plain, drafted), runs, strict=True):
            if not json:
                results.print(f"\n[cyan]{title}[/]")
            output, seconds = answer(llm, prompt, max_tokens, stream=not json)
            run.outputs.append(output)
            run.seconds += seconds
            if not json:
                results.print(f"[dim]{one_line(output, seconds)}[/]", highlight=False)
    result = compare(*runs)
    if json:
        print_json(asdict(result))
    else:
        results.print()
        results.print(table(result))
    if not result.identical:
        raise fail("the tokens differ; `jetspec verify` shows where")


def answer(llm: LLM, prompt: str, max_tokens: int, *, stream: bool) -> tuple[RequestOutput, float]:
    """Answer greedily; returns the answer and the seconds it took."""
    from jetspec.sampling import SamplingParams

    [ids] = llm.encode_prompts([prompt])
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    start = time.perf_counter()
    [output] = llm.generate([ids], params, on_token=write if stream else None)
    seconds = time.perf_counter() - start
    if stream:
        sys.stdout.write("\n")
    return output, seconds


def write(index: int, token_ids: list[int], text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def one_line(output: RequestOutput, seconds: float) -> str:
    tokens = output.metrics.completion_tokens
    per_pass = output.metrics.acceptance_length
    return f"{tokens} tokens, {tokens / seconds:.1f} tokens/s, {per_pass:.2f} tokens a forward"


def compare(plain: Run, drafted: Run) -> DemoResult:
    pairs = zip(plain.outputs, drafted.outputs, strict=True)
    return DemoResult(
        plain_tokens_per_s=round(plain.tokens_per_s, 2),
        jetspec_tokens_per_s=round(drafted.tokens_per_s, 2),
        speedup=round(drafted.tokens_per_s / plain.tokens_per_s, 3),
        acceptance_length=round(drafted.acceptance_length, 3),
        identical=all(a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in pairs),
    )


def table(result: DemoResult) -> Table:
    columns = Table(box=None, padding=(0, 3, 0, 0), header_style="cyan")
    columns.add_column("")
    columns.add_column("plain", justify="right")
    columns.add_column("JetSpec", justify="right")
    columns.add_row("tokens per second", f"{result.plain_tokens_per_s:.1f}", f"{result.jetspec_tokens_per_s:.1f}")
    columns.add_row("acceptance length", "1.00", f"{result.acceptance_length:.2f}")
    columns.add_row("speed-up", "", f"[bold]{result.speedup:.2f}x[/]")
    columns.add_row("tokens identical", "", "[bold green]yes[/]" if result.identical else "[bold red]no[/]")
    return columns
