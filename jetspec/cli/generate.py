"""`jetspec generate`: answers to prompts from the command line, a file or stdin."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from jetspec.cli.common import (
    DEFAULT_TARGET,
    BudgetOption,
    ChatOption,
    ChatTemplateKwargsOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    PromptsOption,
    TargetOption,
    default_head,
    load_model,
    messages,
    print_json,
    results,
)
from jetspec.errors import JetSpecError
from jetspec.prompts import PromptInput, read_prompts, shown

if TYPE_CHECKING:
    from jetspec.llm import RequestOutput


def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT]...", help="Prompts; stdin where there are none.")
    ] = None,
    prompts_file: PromptsOption = None,
    target: TargetOption = DEFAULT_TARGET,
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft",
            "-d",
            help="Draft head (or small model): alias, hub id or directory; `none` decodes plainly. Without it the head "
            "shipped for the target.",
            show_default=False,
        ),
    ] = None,
    draft_method: Annotated[
        str,
        typer.Option(
            "--draft-method",
            help="tree or chain of a draft head, model (a small language model), ngram (prompt lookup).",
        ),
    ] = "tree",
    tree_budget: BudgetOption = "auto",
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy decoding.")] = 0.0,
    seed: Annotated[int | None, typer.Option("--seed", help="Makes sampling repeatable.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on to the longest answer.")] = False,
    chat: ChatOption = None,
    chat_template_kwargs: ChatTemplateKwargsOption = None,
    stream: Annotated[bool, typer.Option(help="Show a single answer while it is written.")] = True,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    json: JsonOption = False,
) -> None:
    """Answer prompts. With --json, one object a prompt on stdout.

    Several prompts run together and print in order. Figures go to stderr.
    """
    texts = gather(prompts or [], prompts_file)
    if draft is None and draft_method in ("tree", "chain"):
        draft = default_head(target)
    elif draft == "none":
        draft = None
    model = load_model(target, device=device, dtype=dtype)
    from jetspec.llm import LLM
    from jetspec.sampling import SamplingParams

    llm = LLM(model, draft, draft_method=draft_method, tree_budget=tree_budget)
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed, ignore_eos=ignore_eos)
    live = stream and not json and len(texts) == 1
    prompts_ids = llm.encode_prompts(texts, chat, chat_template_kwargs)
    outputs = llm.generate(prompts_ids, params, on_token=_write if live else None)
    for text, output in zip(texts, outputs, strict=True):
        if json:
            print_json(record(text, output))
            continue
        if len(texts) > 1:
            results.rule(f"[dim]{escape(shown(text)[:60])}[/]", style="dim", align="left")
        sys.stdout.write("\n" if live else output.outputs[0].text + "\n")
    if not json:
        messages.print(summary(outputs), style="dim", highlight=False)


def gather(prompts: list[str], prompts_file: PromptsOption) -> list[PromptInput]:
    """Prompts from the arguments, else the file, else stdin as one prompt.

    Raises:
        JetSpecError: there are none, or both arguments and a file.
    """
    if prompts and prompts_file is not None:
        raise JetSpecError("give prompts as arguments or with --prompts, not both")
    if prompts_file is not None:
        return read_prompts(prompts_file)
    if not prompts and not sys.stdin.isatty():
        prompts = [sys.stdin.read().strip()]
    if not any(p.strip() for p in prompts):
        raise JetSpecError("no prompt: give one as an argument, with --prompts FILE, or on stdin")
    return [*prompts]


def record(prompt: PromptInput, output: RequestOutput) -> dict[str, Any]:
    completion, metrics = output.outputs[0], output.metrics
    return {
        "prompt": prompt,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": metrics.prompt_tokens,
        "completion_tokens": metrics.completion_tokens,
        "rounds": metrics.rounds,
        "acceptance_length": metrics.acceptance_length,
        "first_token_s": metrics.first_token_s,
        "total_s": metrics.total_s,
    }


def summary(outputs: list[RequestOutput]) -> str:
    """Figures of all answers together in one line."""
    tokens = sum(o.metrics.completion_tokens for o in outputs)
    rounds = sum(o.metrics.rounds for o in outputs)
    decoded = sum(o.metrics.decoded_tokens for o in outputs)
    seconds = max(o.metrics.total_s or 0.0 for o in outputs)
    rate = f"{tokens / seconds:.1f} tokens/s, " if seconds else ""
    return f"{tokens} tokens in {seconds:.1f} s, {rate}{decoded / max(1, rounds):.2f} tokens a forward"


def _write(index: int, token_ids: list[int], text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
