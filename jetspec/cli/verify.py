"""`jetspec verify`: proof of losslessness for the user's own target and head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from jetspec.cli.common import (
    DEFAULT_TARGET,
    BudgetOption,
    ChatOption,
    DeviceOption,
    DraftOption,
    DtypeOption,
    JsonOption,
    PromptsOption,
    TargetOption,
    decode,
    describe,
    fail,
    load_pair,
    messages,
    print_json,
    results,
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


def verify(
    target: TargetOption = DEFAULT_TARGET,
    draft: DraftOption = None,
    prompts_file: PromptsOption = None,
    tree_budget: BudgetOption = 16,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer compared.")] = 64,
    samples: Annotated[int, typer.Option("--samples", min=100, help="Draws of the goodness-of-fit test.")] = 500,
    temperature: Annotated[float, typer.Option("--temperature", help="Temperature of the sampled checks.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="First seed of the sampled checks.")] = 0,
    chat: ChatOption = None,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "auto",
    json: JsonOption = False,
) -> None:
    """Prove that a head leaves a target's output as it is.

    Greedy tokens and seeded samples must equal plain decoding, alone and in a batch; sampled tokens must
    fit the target's own probabilities. The exit status is 0 only if every check passes.
    """
    texts: list[PromptInput] = [*PROMPTS] if prompts_file is None else read_prompts(prompts_file)
    model, head = load_pair(target, draft, device=device, dtype=dtype)
    from jetspec import verify as checks
    from jetspec.llm import LLM

    plain, drafted = LLM(model), LLM(model, head, tree_budget=tree_budget)
    with messages.status("") as status:
        report = checks.verify(
            plain,
            drafted,
            plain.encode_prompts(texts, chat),
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            samples=samples,
            progress=status.update,
        )
    if json:
        print_json(report.to_dict())
    else:
        results.print(f"[bold]JetSpec verify[/]  {describe(plain)}, tree budget {tree_budget}", highlight=False)
        show(report, plain, texts)
    if not report.passed:
        raise fail("the output is not the target's own")


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
    results.print(f"\n{report.acceptance_length:.2f} tokens a forward with the head", highlight=False)


def verdict(passed: bool) -> str:
    return "[green]same[/]" if passed else "[bold red]differs[/]"


def show_difference(difference: Difference, llm: LLM, prompts: Sequence[PromptInput]) -> None:
    context = decode(llm, difference.context)[-CONTEXT_SHOWN:]
    lines = [
        f"  prompt    {difference.prompt_index + 1}: {shown(prompts[difference.prompt_index])[:60]}",
        f"  position  {difference.position} of the answer",
        f"  context   ...{context!r}",
        f"  plain     {_token(llm, difference.expected)}",
        f"  head      {_token(llm, difference.got)}",
    ]
    if difference.logit_margin is not None:
        lines.append(f"  margin    {difference.logit_margin:.3g} between the target's logits of the two")
    results.print("\n".join(lines), markup=False, highlight=False)


def show_fit(fit: FitCheck, llm: LLM) -> None:
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
