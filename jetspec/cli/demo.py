"""`jetspec demo`: three prompts, answered plainly and with JetSpec."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rich.table import Table

from jetspec.cli.common import (
    BudgetOption,
    ChatTemplateKwargsOption,
    DraftOptions,
    JsonOption,
    MaxTokensOption,
    ModelOptions,
    PromptOptions,
    describe,
    fail,
    print_json,
    results,
    takes_groups,
    write_text,
)

if TYPE_CHECKING:
    from jetspec.llm import LLM
    from jetspec.outputs import RequestOutput

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
MODEL = ModelOptions(dtype="float32")


@dataclass
class DemoResult:
    """The figures of the closing table. Tokens per second include the time of the prompt, not that of loading."""

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
        """Tokens per second over all answers."""
        return sum(o.metrics.completion_tokens for o in self.outputs) / self.seconds

    @property
    def acceptance_length(self) -> float:
        """Tokens per verify forward over all answers."""
        rounds = sum(o.metrics.rounds for o in self.outputs)
        return sum(o.metrics.decoded_tokens for o in self.outputs) / rounds if rounds else 0.0


@takes_groups
def demo(
    draft: DraftOptions,
    model: ModelOptions = MODEL,
    tree_budget: BudgetOption = "auto",
    max_tokens: MaxTokensOption = 128,
    chat_template_kwargs: ChatTemplateKwargsOption = None,
    json: JsonOption = False,
) -> None:
    """Answer three prompts twice, plainly and with JetSpec, and compare.

    The exit status is 0 only if the tokens are identical.
    """
    settings = draft.required_settings("demo")
    target = model.load()
    from jetspec.llm import LLM

    plain, drafted = LLM(target, None), LLM(target, **settings, tree_budget=tree_budget)
    prompting = PromptOptions(chat_template_kwargs=chat_template_kwargs)
    if not json:
        results.print(f"[bold]JetSpec demo[/]  {describe(plain)}, tree budget {tree_budget}", highlight=False)
    for llm in (plain, drafted):
        answer(llm, prompting, WARM_UP, min(max_tokens, WARM_UP_TOKENS), stream=False)
    runs = (Run([]), Run([]))
    for number, prompt in enumerate(PROMPTS, 1):
        if not json:
            results.print(f"\n[bold]{number}/{len(PROMPTS)}[/] {prompt}", highlight=False)
        for title, llm, run in zip(("plain decoding", "with JetSpec"), (plain, drafted), runs, strict=True):
            if not json:
                results.print(f"\n[cyan]{title}[/]")
            output, seconds = answer(llm, prompting, prompt, max_tokens, stream=not json)
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


def answer(
    llm: LLM, prompting: PromptOptions, prompt: str, max_tokens: int, *, stream: bool
) -> tuple[RequestOutput, float]:
    """Answer a prompt greedily. Returns the answer and the seconds it took."""
    from jetspec.sampling import SamplingParams

    [ids] = prompting.encode(llm, [prompt])
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    start = time.perf_counter()
    [output] = llm.generate([ids], params, on_token=write_text if stream else None)
    seconds = time.perf_counter() - start
    if stream:
        sys.stdout.write("\n")
    return output, seconds


def one_line(output: RequestOutput, seconds: float) -> str:
    """The figures of one answer."""
    tokens = output.metrics.completion_tokens
    per_pass = output.metrics.acceptance_length
    return f"{tokens} tokens, {tokens / seconds:.1f} tokens/s, {per_pass:.2f} tokens a forward"


def compare(plain: Run, drafted: Run) -> DemoResult:
    """The figures of both runs."""
    pairs = zip(plain.outputs, drafted.outputs, strict=True)
    return DemoResult(
        plain_tokens_per_s=round(plain.tokens_per_s, 2),
        jetspec_tokens_per_s=round(drafted.tokens_per_s, 2),
        speedup=round(drafted.tokens_per_s / plain.tokens_per_s, 3),
        acceptance_length=round(drafted.acceptance_length, 3),
        identical=all(a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in pairs),
    )


def table(result: DemoResult) -> Table:
    """The closing table."""
    columns = Table(box=None, padding=(0, 3, 0, 0), header_style="cyan")
    columns.add_column("")
    columns.add_column("plain", justify="right")
    columns.add_column("JetSpec", justify="right")
    columns.add_row("tokens per second", f"{result.plain_tokens_per_s:.1f}", f"{result.jetspec_tokens_per_s:.1f}")
    columns.add_row("acceptance length", "1.00", f"{result.acceptance_length:.2f}")
    columns.add_row("speed-up", "", f"[bold]{result.speedup:.2f}x[/]")
    columns.add_row("tokens identical", "", "[bold green]yes[/]" if result.identical else "[bold red]no[/]")
    return columns
