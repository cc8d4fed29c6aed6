"""What the commands share: options in groups, consoles, loading, text of tokens."""

from __future__ import annotations

import inspect
import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer
from rich.console import Console

from jetspec.errors import JetSpecError

if TYPE_CHECKING:
    from jetspec.inputs import ChatTemplateKwargs
    from jetspec.llm import LLM
    from jetspec.models.target import Target

#: The target that the commands use by default: the model whose head ships with the package.
DEFAULT_TARGET = "smollm2-135m"

#: Results go to stdout; progress and messages to stderr, so that stdout can be piped.
results = Console()
messages = Console(stderr=True)


def parse_budget(value: str | int) -> int | Literal["auto"]:
    """Read the value of --tree-budget. Raises typer.BadParameter."""
    text = str(value)
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"{text!r} is neither auto nor a number of rows of at least 1")
    return int(text)


def parse_chat_template_kwargs(value: str | dict[str, Any]) -> dict[str, Any]:
    """Read the value of --chat-template-kwargs. Raises typer.BadParameter."""
    if isinstance(value, dict):
        return value
    try:
        kwargs = json.loads(value)
    except ValueError:
        kwargs = None
    if not isinstance(kwargs, dict):
        raise typer.BadParameter(f'{value!r} is not a JSON object; write it like {{"enable_thinking": false}}')
    return kwargs


BudgetOption = Annotated[
    Any,
    typer.Option(
        "--tree-budget",
        metavar="auto|ROWS",
        parser=parse_budget,
        help="Rows of each sequence's verify forward, root included. auto chooses them for speed.",
    ),
]
TargetOption = Annotated[
    str, typer.Option("--target", "-t", help="Target model: alias, hub id, directory or .gguf file.")
]
DraftOption = Annotated[
    str,
    typer.Option(
        "--draft",
        "-d",
        help="Draft head or small model: alias, hub id or directory. auto takes the head that ships for the target, "
        "else one published for it on the hub, else prompt lookup. none decodes plainly.",
    ),
]
HeadOption = Annotated[str, typer.Option("--draft", "-d", help="Draft head: alias, hub id or directory.")]
CausalOption = Annotated[
    bool | None,
    typer.Option(
        "--causal/--bidirectional",
        help="Kind of the head's blocks, for a head whose config.json does not say: JetSpec heads are causal, DFlash "
        "heads are bidirectional.",
        show_default=False,
    ),
]
DeviceOption = Annotated[str, typer.Option("--device", help="Device: auto, cpu, cuda, cuda:1, ...")]
DtypeOption = Annotated[str, typer.Option("--dtype", help="Number type: auto, float32, bfloat16 or float16.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")]
MaxTokensOption = Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Tokens of an answer at most.")]
TemperatureOption = Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy decoding.")]
ChatOption = Annotated[
    bool | None,
    typer.Option(
        "--chat/--raw",
        help="Use the chat template, or the prompt as it is. By default the template is used if the target has one.",
        show_default=False,
    ),
]
ChatTemplateKwargsOption = Annotated[
    Any,
    typer.Option(
        "--chat-template-kwargs",
        metavar="JSON",
        parser=parse_chat_template_kwargs,
        help='Arguments of the chat template, like {"enable_thinking": false}.',
        show_default=False,
    ),
]
PromptsOption = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        "-f",
        help="Source of prompts: a text file (one prompt a line), .jsonl, .json, or hub:owner/name.",
        show_default=False,
    ),
]


@dataclass(frozen=True)
class ModelOptions:
    """Options that load a target."""

    target: TargetOption = DEFAULT_TARGET
    dtype: DtypeOption = "auto"
    device: DeviceOption = "auto"

    def load(self) -> Target:
        """Load the target, without transformers' own progress bars and advice. Raises JetSpecError."""
        with messages.status(f"loading {self.target}"):
            from jetspec.models.loading import load_target

            quiet_transformers()
            return load_target(self.target, device=self.device, dtype=self.dtype)


@dataclass(frozen=True)
class DraftOptions:
    """Options that load what drafts for the target."""

    draft: DraftOption = "auto"
    draft_method: Annotated[
        str,
        typer.Option(
            "--draft-method",
            help="How to draft: tree or chain with a draft head, model (a small language model) or ngram (prompt "
            "lookup, without --draft).",
        ),
    ] = "tree"
    causal: CausalOption = None
    head_window: Annotated[
        int | None,
        typer.Option("--head-window", min=1, help="Tokens that a draft head looks back on.", show_default="all"),
    ] = None

    def settings(self) -> dict[str, Any]:
        """The arguments of `LLM` that these options set."""
        return {
            "draft": None if self.draft == "none" else self.draft,
            "draft_method": self.draft_method,
            "head_window": self.head_window,
            "head_causal": self.causal,
        }

    def required_settings(self, command: str) -> dict[str, Any]:
        """`settings`, for a command that is about the draft. Raises JetSpecError for --draft none."""
        if self.draft == "none":
            raise JetSpecError(f"--draft none: {command} needs a draft; leave the option out, or name a head")
        return self.settings()


@dataclass(frozen=True)
class EngineOptions:
    """Options of the engine, under the names of the arguments of `LLM`."""

    tree_budget: BudgetOption = "auto"
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant",
            help="Give the same text to the last bit whatever the batch and the draft, in half precision too; slower.",
        ),
    ] = False
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", min=1, help="Sequences that decode together.")] = 64
    max_num_batched_tokens: Annotated[
        int, typer.Option("--max-num-batched-tokens", min=1, help="Rows of one target forward, over all sequences.")
    ] = 1024
    kv_block_size: Annotated[int, typer.Option("--kv-block-size", min=1, help="Tokens of one K/V cache block.")] = 16

    def settings(self) -> dict[str, Any]:
        """The arguments of `LLM` that these options set."""
        return asdict(self)


@dataclass(frozen=True)
class PromptOptions:
    """Options that turn prompts into token ids."""

    chat: ChatOption = None
    chat_template_kwargs: ChatTemplateKwargsOption = None

    def encode(self, llm: LLM, prompts: Sequence[Any]) -> list[list[int]]:
        """The token ids of each prompt. Raises JetSpecError."""
        kwargs: ChatTemplateKwargs | None = self.chat_template_kwargs
        return llm.encode_prompts(prompts, self.chat, kwargs)


def takes_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take groups of options: a parameter that is a dataclass stands for an option for each field.

    The parameter's default, an instance, holds the defaults of the options. Without one they are the group's own.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        group = parameter.annotation
        if not is_dataclass(group):
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        groups[parameter.name] = group
        hints = get_type_hints(group, include_extras=True)
        defaults = group if parameter.default is inspect.Parameter.empty else parameter.default
        parameters += [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=getattr(defaults, field.name),
                annotation=hints[field.name],
            )
            for field in fields(group)
        ]

    @wraps(command)
    def call(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return call


class MessageHandler(logging.Handler):
    """Prints what the package logs as plain lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        style = "yellow" if record.levelno >= logging.WARNING else "dim"
        messages.print(record.getMessage(), markup=False, highlight=False, soft_wrap=True, style=style)


def show_log() -> None:
    """Print the package's log, from level INFO, on stderr. Doing so twice prints every line once."""
    logger = logging.getLogger("jetspec")
    logger.setLevel(logging.INFO)
    if not any(isinstance(handler, MessageHandler) for handler in logger.handlers):
        logger.addHandler(MessageHandler())


def fail(message: str) -> typer.Exit:
    """Print one line of error on stderr. Returns the exit with status 1, to be raised."""
    messages.print(f"error: {message}", markup=False, highlight=False, soft_wrap=True, style="red")
    return typer.Exit(1)


def check_utf_8(arguments: Sequence[str]) -> None:
    """Refuse arguments with bytes that are not UTF-8, which Python holds as lone surrogates.

    Raises:
        typer.BadParameter: one has such bytes. The message shows them escaped.
    """
    for argument in arguments:
        if not is_utf_8(argument):
            raw = argument.encode("utf-8", "surrogateescape")
            shown = raw.decode("utf-8", "backslashreplace")
            raise typer.BadParameter(f"'{shown}' is not valid UTF-8; rename the file, or write the text in UTF-8")


def is_utf_8(text: str) -> bool:
    """Whether a text can be written in UTF-8, which lone surrogates cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def print_json(data: Any) -> None:
    """Print one JSON object on one line of stdout."""
    sys.stdout.write(json.dumps(data, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def write_text(_index: int, _token_ids: list[int], text: str) -> None:
    """Print the new text of an answer at once; an `on_token` of `LLM`."""
    sys.stdout.write(text)
    sys.stdout.flush()


def quiet_transformers() -> None:
    """Switch off the progress bars and advice of transformers."""
    from transformers.utils import logging as module

    library: Any = module  # its functions are not typed
    library.disable_progress_bar()
    library.set_verbosity_error()


def decode(llm: LLM, ids: Sequence[int]) -> str:
    """The text of token ids, special tokens included."""
    assert llm.target.tokenizer is not None, "prompts were encoded with it"
    return str(llm.target.tokenizer.decode(list(ids)))


def token_text(llm: LLM, token: int) -> str:
    """A token as quoted text, with control characters escaped."""
    return json.dumps(decode(llm, [token]), ensure_ascii=False)


def describe(llm: LLM) -> str:
    """Target, number type and device in a few words."""
    dtype = str(llm.target.dtype).removeprefix("torch.")
    return f"{llm.target.name}, {dtype} on {llm.target.device}"
