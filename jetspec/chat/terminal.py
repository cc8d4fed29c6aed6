"""A chat at a terminal: what is typed, and how answers look."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from jetspec.chat.session import COMMANDS, Chat, printable, stopped_by_ctrl_c
from jetspec.errors import EngineError, JetSpecError

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent


class TerminalScreen:
    """Shows answers on stdout, and notes on stderr.

    Args:
        results: the console of stdout.
        messages: the console of stderr.
        show_reasoning: also show what a server sets apart from the answer.
    """

    def __init__(self, results: Console, messages: Console, *, show_reasoning: bool = True) -> None:
        self._results = results
        self._messages = messages
        self._show_reasoning = show_reasoning
        self._reasoned = False

    def text(self, piece: str) -> None:
        """Show the next piece of an answer."""
        if self._reasoned:
            self._write("\n\n")
            self._reasoned = False
        self._write(piece)

    def reasoning(self, piece: str) -> None:
        """Show a piece of reasoning, dimmed."""
        if self._show_reasoning:
            self._write(piece, style="dim")
            self._reasoned = True

    def end(self) -> None:
        """End the line of an answer."""
        self._reasoned = False
        self._write("\n")

    def note(self, line: str) -> None:
        """Show a line that is no part of the answer, dimmed."""
        self._messages.print(printable(line), style="dim", markup=False, highlight=False, soft_wrap=True)

    def error(self, line: str) -> None:
        """Show an error."""
        self._messages.print(f"error: {printable(line)}", style="red", markup=False, highlight=False, soft_wrap=True)

    def _write(self, piece: str, style: str | None = None) -> None:
        # Where stdout is no terminal, the text goes through as it is.
        text = printable(piece) if self._results.is_terminal else piece
        self._results.out(text, end="", style=style, highlight=False)
        self._results.file.flush()


async def converse(chat: Chat, screen: TerminalScreen, prompt: PromptSession[str]) -> None:
    """Ask what is typed until /quit or Ctrl-D. Errors are shown, and the chat goes on.

    Raises:
        EngineError: the engine stopped, so nothing can be answered any more.
    """
    with stopped_by_ctrl_c(chat):
        while True:
            try:
                text = await prompt.prompt_async(handle_sigint=False)
            except KeyboardInterrupt:  # the line is cleared
                screen.note("/quit or Ctrl-D leaves")
                continue
            except EOFError:
                return
            if not text.strip():
                continue
            try:
                if not await chat.say(text):
                    return
            except EngineError:
                raise
            except JetSpecError as error:
                screen.error(str(error))


def new_prompt() -> PromptSession[str]:
    """Where questions are typed: several lines, with the earlier ones under the arrow keys.

    Raises:
        JetSpecError: prompt_toolkit is missing.
    """
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.formatted_text import FormattedText
        from prompt_toolkit.output import create_output
    except ImportError as error:
        raise JetSpecError("a chat at a terminal needs prompt_toolkit: pip install 'jetspec[chat]'") from error
    return PromptSession(
        FormattedText([("bold", "> ")]),
        prompt_continuation="  ",
        multiline=True,
        key_bindings=_keys(),
        completer=WordCompleter([name.split()[0] for name in COMMANDS], sentence=True),
        complete_while_typing=False,
        output=create_output(always_prefer_tty=True),  # stdout may be a pipe
    )


def _keys() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.char_before_cursor == "\\":
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("escape", "c-j")  # what was typed before the prompt was there has a line feed for Enter
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
