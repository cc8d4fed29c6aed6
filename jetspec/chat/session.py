"""Questions, commands and answers of a chat, apart from how they are typed."""

from __future__ import annotations

import asyncio
import signal
import time
import unicodedata
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import FrameType
from typing import Protocol

from jetspec.chat.backends import Backend
from jetspec.chat.conversation import Conversation
from jetspec.client import Usage
from jetspec.errors import JetSpecError
from jetspec.prompts import Message

#: What each command does, in the order in which /help lists them.
COMMANDS = {
    "/help": "list the commands",
    "/reset": "forget the conversation, but not the system message",
    "/system [TEXT]": "show the system message, or set it and start anew; - removes it",
    "/retry": "ask the last question again",
    "/save FILE": "write the conversation to a new file, as JSON that other commands read as a prompt",
    "/quit": "leave, as Ctrl-D does",
}
HELP = "Enter sends. Alt-Enter, or \\ before Enter, starts a new line. Ctrl-C stops an answer, or clears what is typed."


class Screen(Protocol):
    """Where a chat shows itself."""

    def text(self, piece: str) -> None:
        """Show the next piece of an answer."""

    def reasoning(self, piece: str) -> None:
        """Show the next piece of what a server sets apart from the answer."""

    def end(self) -> None:
        """End the line of an answer."""

    def note(self, line: str) -> None:
        """Show something that is no part of the answer."""


@dataclass
class Answer:
    """An answer while it is written. Seconds count from the question."""

    text: str = ""
    finish_reason: str | None = None
    first_s: float | None = None
    total_s: float = 0.0
    stopped: bool = False
    usage: Usage | None = None

    def summary(self) -> str:
        """The figures in one line, as far as they are known."""
        parts = [f"stopped after {self.total_s:.1f} s"] if self.stopped else []
        if self.usage is not None:
            tokens = self.usage.completion_tokens
            rate = f", {tokens / self.total_s:.1f} tokens/s" if self.total_s else ""
            parts.append(f"{tokens} tokens in {self.total_s:.1f} s{rate}")
            if self.usage.acceptance_length is not None:
                parts.append(f"acceptance length {self.usage.acceptance_length:.2f}")
        elif not self.stopped:
            parts.append(f"{self.total_s:.1f} s")
        if self.first_s is not None:
            parts.append(f"first text after {self.first_s:.2f} s")
        if self.finish_reason == "length":
            parts.append("cut off: --max-tokens or the context is used up")
        return ", ".join(parts)


@dataclass
class Chat:
    """A conversation with a backend, shown on a screen.

    Args:
        backend: what answers.
        screen: where answers and notes go.
        conversation: the messages so far.
    """

    backend: Backend
    screen: Screen
    conversation: Conversation = field(default_factory=Conversation)
    _answering: asyncio.Task[None] | None = None
    #: Whether `stop` has ended the answer, and not whoever cancelled the chat.
    _stopping: bool = False

    async def say(self, text: str) -> bool:
        """Handle what was typed: a command if it starts with a slash, else a question. Returns whether to go on.

        Raises:
            JetSpecError: there is no such command, it cannot be carried out, or the question was not answered.
        """
        if not text.startswith("/"):
            await self.ask(text)
            return True
        name, _, rest = text.strip().partition(" ")
        if name in ("/quit", "/exit"):
            return False
        commands: dict[str, Callable[[str], Awaitable[None]]] = {
            "/help": self._help,
            "/reset": self._reset,
            "/system": self._system,
            "/retry": self._retry,
            "/save": self._save,
        }
        if name not in commands:
            close = get_close_matches(name, [*commands, "/quit"], 1)
            hint = f"did you mean {close[0]}" if close else "/help lists the commands"
            raise JetSpecError(f"{name}: no such command; {hint}; a space before the slash makes it a question")
        await commands[name](rest.strip())
        return True

    async def ask(self, text: str) -> Answer:
        """Ask a question, and show the answer as it is written. `stop` ends it early.

        A question without an answer is taken back, so that it can be asked again.

        Raises:
            JetSpecError: the question was not answered.
        """
        self.conversation.ask(text)
        answer = Answer()
        start = time.perf_counter()
        self._stopping = False
        self._answering = asyncio.ensure_future(self._read(self.conversation.messages(), answer, start))
        try:
            await self._answering
        except asyncio.CancelledError:
            if not self._stopping:
                raise  # the chat itself is to end
            answer.stopped = True
        finally:
            self._answering = None
            answer.total_s = time.perf_counter() - start
            self.conversation.answer(answer.text)
            self.screen.end()
        answer.usage = await self.backend.usage()
        self.screen.note(answer.summary())
        return answer

    def stop(self) -> None:
        """End the answer that is being written; nothing happens if there is none."""
        if self._answering is not None:
            self._stopping = True
            self._answering.cancel()

    async def _read(self, messages: Sequence[Message], answer: Answer, start: float) -> None:
        async with aclosing(self.backend.stream(messages)) as stream:
            async for delta in stream:
                if answer.first_s is None and (delta.text or delta.reasoning):
                    answer.first_s = time.perf_counter() - start
                if delta.reasoning:
                    self.screen.reasoning(delta.reasoning)
                if delta.text:
                    answer.text += delta.text
                    self.screen.text(delta.text)
                answer.finish_reason = delta.finish_reason or answer.finish_reason

    async def _help(self, _: str) -> None:
        width = max(map(len, COMMANDS))
        for command, meaning in COMMANDS.items():
            self.screen.note(f"{command:<{width}}  {meaning}")
        self.screen.note(HELP)

    async def _reset(self, _: str) -> None:
        self.conversation.turns.clear()
        self.screen.note("the conversation starts anew")

    async def _system(self, text: str) -> None:
        if text:
            self.conversation.system = None if text == "-" else text
            await self._reset("")
        self.screen.note(f"system message: {self.conversation.system or 'none'}")

    async def _retry(self, _: str) -> None:
        await self.ask(self.conversation.take_back())

    async def _save(self, name: str) -> None:
        if not name:
            raise JetSpecError("/save: name a file, as in /save talk.jsonl")
        path = Path(name).expanduser()
        self.conversation.save(path)
        self.screen.note(f"written: {path}")


@contextmanager
def stopped_by_ctrl_c(chat: Chat) -> Iterator[None]:
    """Let Ctrl-C stop the answer that is being written, and nothing else. For the main thread, in an event loop."""
    loop = asyncio.get_running_loop()

    def stop(_signal: int, _frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(chat.stop)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def printable(text: str) -> str:
    """A text as a terminal may show it: control characters, which could move the cursor, become replacement signs."""
    return "".join("\ufffd" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)
