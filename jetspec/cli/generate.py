"""`jetspec generate`: answers prompts from the command line, a file or stdin."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from jetspec.cli.common import messages, print_json, read_stdin, results, write_text
from jetspec.cli.options import (
    DraftOptions,
    EngineOptions,
    JsonOption,
    MaxTokensOption,
    ModelOptions,
    PromptOptions,
    PromptsOption,
    TemperatureOption,
    takes_groups,
)
from jetspec.errors import JetSpecError
from jetspec.prompts import PromptInput, read_prompts, shown

if TYPE_CHECKING:
    from jetspec.outputs import RequestOutput


@takes_groups
def generate(
    model: ModelOptions,
    draft: DraftOptions,
    engine: EngineOptions,
    prompting: PromptOptions,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT]...", help="Prompts; without any, stdin is one prompt.")
    ] = None,
    prompts_file: PromptsOption = None,
    max_tokens: MaxTokensOption = 256,
    temperature: TemperatureOption = 0.0,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Seed that makes sampling repeatable.", show_default=False)
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Continue to --max-tokens, past the end of the text.")
    ] = False,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Show a single answer as it is written.")] = True,
    json: JsonOption = False,
) -> None:
    """Answer prompts.

    Several prompts run together; their answers print in order. With --json, every answer is one object on stdout.
    Figures go to stderr.
    """
    texts = gather(prompts or [], prompts_file)
    target = model.load()
    from jetspec.llm import LLM
    from jetspec.sampling import SamplingParams

    llm = LLM(target, **draft.settings(), **engine.settings())
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed, ignore_eos=ignore_eos)
    live = stream and not json and len(texts) == 1
    outputs = llm.generate(prompting.encode(llm, texts), params, on_token=write_text if live else None)
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
    """The prompts of the arguments, else of the file, else stdin as one prompt.

    Raises:
        JetSpecError: there is none, both arguments and a file are given, or stdin is not valid UTF-8.
    """
    if prompts and prompts_file is not None:
        raise JetSpecError("--prompts: give prompts as arguments or in a file, not both")
    if prompts_file is not None:
        return read_prompts(prompts_file)
    if not prompts and not sys.stdin.isatty():
        prompts = [read_stdin().strip()]
    if not any(p.strip() for p in prompts):
        raise JetSpecError("no prompt: give one as an argument, with --prompts FILE, or on stdin")
    return [*prompts]


def record(prompt: PromptInput, output: RequestOutput) -> dict[str, Any]:
    """An answer as a JSON object; times in seconds."""
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
    """The figures of all answers together, in one line."""
    tokens = sum(o.metrics.completion_tokens for o in outputs)
    rounds = sum(o.metrics.rounds for o in outputs)
    decoded = sum(o.metrics.decoded_tokens for o in outputs)
    seconds = max(o.metrics.total_s or 0.0 for o in outputs)
    rate = f"{tokens / seconds:.1f} tokens/s, " if seconds else ""
    return f"{tokens} tokens in {seconds:.1f} s, {rate}{decoded / max(1, rounds):.2f} tokens a forward"
