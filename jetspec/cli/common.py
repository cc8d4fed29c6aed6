"""What the commands share: consoles, messages, errors, text of tokens."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from jetspec.errors import JetSpecError, is_utf_8

if TYPE_CHECKING:
    from jetspec.llm import LLM

#: Exit status of a program that Ctrl-C ended.
INTERRUPTED = 130
#: Results go to stdout; progress and messages to stderr, so that stdout can be piped.
results = Console()
messages = Console(stderr=True)


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


def read_stdin() -> str:
    """All of stdin. Raises JetSpecError where it is not valid UTF-8."""
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError:
        text = "\udcff"
    if not is_utf_8(text):
        raise JetSpecError("standard input is not valid UTF-8; convert it first, as with `iconv -t utf-8`")
    return text


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
