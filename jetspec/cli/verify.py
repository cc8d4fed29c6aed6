"""`jetspec verify`: checks that a draft does not change the output of the user's own target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from jetspec.cli.common import (
    DraftOptions,
    EngineOptions,
    JsonOption,
    MaxTokensOption,
    ModelOptions,
    PromptOptions,
    PromptsOption,
    decode,
    describe,
    fail,
    messages,
    print_json,
    results,
    takes_groups,
    token_text,
)
from jetspec.prompts import PromptInput, read_prompts, shown

if TYPE_CHECKING:
    from jetspec.llm import LLM
    from jetspec.verify import Difference, FitCheck, Report

PROMPTS = (
    "Name three colours.",
    "A farmer has 17 hens and buys 8 more. How many hens does he have?",
    "Write a Python function that reverses a list without using slicing.",
    "Explain in two sentences why the sky is blue.",
    "Translate into French: The library opens at nine o'clock and closes late in the evening.",
)
CONTEXT_SHOWN = 80


MODEL = ModelOptions(dtype="float32")
ENGINE = EngineOptions(tree_budget=16)


@takes_groups
def verify(
    draft: DraftOptions,
    prompting: PromptOptions,
    model: ModelOptions = MODEL,
    engine: EngineOptions = ENGINE,
    prompts_file: PromptsOption = None,
    max_tokens: MaxTokensOption = 64,
    samples: Annotated[int, typer.Option("--samples", min=100, help="Draws of the goodness-of-fit test.")] = 500,
    temperature: Annotated[float, typer.Option("--temperature", help="Temperature of the sampled checks.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="First seed of the sampled checks.")] = 0,
    json: JsonOption = False,
) -> None:
    """Check that a draft does not change a target's output.

    Greedy tokens and seeded samples must equal plain decoding, one prompt at a time and in a batch. The distribution of
    sampled tokens must fit the target's own probabilities. The exit status is 0 only if every check passes.
    """
    settings = draft.required_settings("verify")
    texts: list[PromptInput] = [*PROMPTS] if prompts_file is None else read_prompts(prompts_file)
    target = model.load()
    from jetspec import verify as checks
    from jetspec.llm import LLM

    plain = LLM(target, None, **engine.settings())
    drafted = LLM(target, **settings, **engine.settings())
    with messages.status("") as status:
        report = checks.verify(
            plain,
            drafted,
            prompting.encode(plain, texts),
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            samples=samples,
            progress=status.update,
        )
    if json:
        print_json(report.to_dict())
    else:
        results.print(f"[bold]JetSpec verify[/]  {describe(plain)}, tree budget {engine.tree_budget}", highlight=False)
        show(report, plain, texts)
    if not report.passed:
        raise fail("the draft changes the target's output")


def show(report: Report, llm: LLM, prompts: Sequence[PromptInput]) -> None:
    """Print every check, the first difference of each that failed, and the verdict."""
    checks = Table(box=None, padding=(0, 3, 0, 0), header_style="cyan")
    for title in ("check", "at once", "compared", "result"):
        checks.add_column(title)
    for check in report.token_checks:
        checks.add_row(check.name, str(check.batch_size), f"{check.tokens} tokens", verdict(check.passed))
    fit = report.fit
    compared = f"{fit.samples} samples, {fit.cells} cells"
    checks.add_row("distribution", "", compared, f"{verdict(fit.passed)} (p = {fit.p_value:.2g})")
    results.print(checks)
    for check in report.token_checks:
        if check.difference is not None:
            results.print(f"\n[bold]{check.name}, {check.batch_size} at once[/]: first difference", highlight=False)
            show_difference(check.difference, llm, prompts)
    if not fit.passed:
        show_fit(fit, llm)
    results.print(f"\n{report.acceptance_length:.2f} tokens a forward with the draft", highlight=False)


def verdict(passed: bool) -> str:
    """A word for a table."""
    return "[green]same[/]" if passed else "[bold red]differs[/]"


def show_difference(difference: Difference, llm: LLM, prompts: Sequence[PromptInput]) -> None:
    """Print where a run left plain decoding, and how far apart the two tokens are."""
    context = decode(llm, difference.context)[-CONTEXT_SHOWN:]
    lines = [
        f"  prompt    {difference.prompt_index + 1}: {shown(prompts[difference.prompt_index])[:60]}",
        f"  position  {difference.position} of the answer",
        f"  context   ...{context!r}",
        f"  plain     {_token(llm, difference.expected)}",
        f"  draft     {_token(llm, difference.got)}",
    ]
    if difference.logit_margin is not None:
        lines.append(f"  margin    {difference.logit_margin:.3g} between the target's logits of the two")
    results.print("\n".join(lines), markup=False, highlight=False)


def show_fit(fit: FitCheck, llm: LLM) -> None:
    """Print the failed test and the continuation that fits least."""
    start = " ".join(token_text(llm, t) for t in fit.worst_tokens) or "any other token"
    results.print(
        f"\n[bold]distribution[/]: chi-square {fit.statistic:.1f} with {fit.degrees} degrees of freedom, "
        f"p = {fit.p_value:.2g} is below {fit.threshold:g}",
        highlight=False,
    )
    results.print(
        f"  worst     {start}: expected {fit.worst_expected:.1f} times, drawn {fit.worst_observed} times",
        markup=False,
        highlight=False,
    )


def _token(llm: LLM, token: int | None) -> str:
    return "the answer had ended" if token is None else f"{token_text(llm, token)} (token {token})"
