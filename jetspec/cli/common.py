"""What the commands share: options, consoles, loading, prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from jetspec.errors import JetSpecError

if TYPE_CHECKING:
    from jetspec.head import DraftHead
    from jetspec.llm import LLM
    from jetspec.models.target import Target

#: What the commands use where no target is named: the model whose head ships with the package.
DEFAULT_TARGET = "smollm2-135m"


def parse_budget(value: str | int) -> int | Literal["auto"]:
    """The `tree_budget` an option means. Raises typer.BadParameter."""
    text = str(value)
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"{text!r} is neither auto nor a number of rows of at least 1")
    return int(text)


def parse_chat_template_kwargs(value: str | dict[str, Any]) -> dict[str, Any]:
    """The `chat_template_kwargs` an option means. Raises typer.BadParameter."""
    if isinstance(value, dict):
        return value
    try:
        switches = json.loads(value)
    except ValueError:
        switches = None
    if not isinstance(switches, dict):
        raise typer.BadParameter(f'{value!r} is not a JSON object, as {{"enable_thinking": false}} is')
    return switches


BudgetOption = Annotated[
    Any,
    typer.Option(
        "--tree-budget",
        metavar="auto|ROWS",
        parser=parse_budget,
        help="Rows of a sequence's verify forward, root included; auto chooses them for speed.",
    ),
]
TargetOption = Annotated[
    str, typer.Option("--target", "-t", help="Target model: alias, hub id, directory or .gguf file.")
]
DraftOption = Annotated[
    str | None,
    typer.Option(
        "--draft",
        "-d",
        help="Draft head: alias, hub id or directory. Without it the head shipped for the target.",
        show_default=False,
    ),
]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...")]
DtypeOption = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")]
ChatOption = Annotated[
    bool | None,
    typer.Option(
        "--chat/--raw", help="Use the chat template, or the prompt as it is; by default where the target has one."
    ),
]
ChatTemplateKwargsOption = Annotated[
    Any,
    typer.Option(
        "--chat-template-kwargs",
        metavar="JSON",
        parser=parse_chat_template_kwargs,
        help='ChatTemplateKwargs of the chat template: {"enable_thinking": false}.',
        show_default=False,
    ),
]
PromptsOption = Annotated[
    Path | None,
    typer.Option("--prompts", "-f", help="Prompts: a text file (one a line), .jsonl, .json, or hub:owner/name."),
]

#: Results. Progress and messages go to `messages`, so that stdout can be piped.
results = Console()
messages = Console(stderr=True)


def fail(message: str) -> typer.Exit:
    """Print one line of error; raise what it returns."""
    messages.print(f"error: {message}", markup=False, highlight=False, soft_wrap=True, style="red")
    return typer.Exit(1)


def print_json(data: Any) -> None:
    """One JSON object on one line of stdout."""
    sys.stdout.write(json.dumps(data, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def load_model(target: str, *, device: str, dtype: str) -> Target:
    """Load a target, without transformers' own progress bars and advice."""
    with messages.status(f"loading {target}"):
        from jetspec.models.loading import load_target

        quiet_transformers()
        return load_target(target, device=device, dtype=dtype)


def quiet_transformers() -> None:
    """Switch off the progress bars and advice of transformers."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def load_pair(target: str, draft: str | None, *, device: str, dtype: str) -> tuple[Target, DraftHead]:
    """Load a target and its head: the one named, else the one shipped under the target's alias.

    Raises:
        JetSpecError: no head is named and none is shipped, or either cannot be loaded.
    """
    from jetspec.head import load_head

    name = draft or default_head(target)
    model = load_model(target, device=device, dtype=dtype)
    return model, load_head(name, device=model.device, dtype=model.dtype)


def default_head(target: str) -> str:
    """The alias of the head shipped for a target. JetSpecError if there is none."""
    from jetspec.head import shipped_heads

    if target not in shipped_heads():
        raise JetSpecError(f"--draft: no head is shipped for target {target!r}; name one (`generate` also takes none)")
    return target


def decode(llm: LLM, ids: Sequence[int]) -> str:
    """The text of token ids, special tokens included."""
    assert llm.target.tokenizer is not None, "prompts were encoded with it"
    return str(llm.target.tokenizer.decode(list(ids)))


def token_text(llm: LLM, token: int) -> str:
    """A token as quoted text, with control characters escaped."""
    return json.dumps(decode(llm, [token]), ensure_ascii=False)


def describe(llm: LLM) -> str:
    """Target, head, number type and device in a few words."""
    dtype = str(llm.target.dtype).removeprefix("torch.")
    return f"{llm.target.name}, {dtype} on {llm.target.device}"
