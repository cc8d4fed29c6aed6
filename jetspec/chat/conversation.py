"""The messages of a chat."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from jetspec.errors import JetSpecError, is_utf_8
from jetspec.files import write_atomically
from jetspec.prompts import Message


@dataclass
class Conversation:
    """Questions and answers in turn, after an optional system message."""

    system: str | None = None
    turns: list[Message] = field(default_factory=list)

    def messages(self) -> list[Message]:
        """All messages, as chat templates and servers take them."""
        system: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.turns]

    def ask(self, text: str) -> None:
        """Add a question. JetSpecError if it cannot be written in UTF-8."""
        if not is_utf_8(text):
            raise JetSpecError("the message is not valid UTF-8; check the encoding of the terminal")
        self.turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """Add the answer to the last question. Without any text, the question is taken back."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        else:
            self.turns.pop()

    def take_back(self) -> str:
        """Remove the last question and its answer. Returns the question. JetSpecError if there is none."""
        if not self.turns:
            raise JetSpecError("there is no question yet")
        question: str = self.turns[-2]["content"]
        del self.turns[-2:]
        return question

    def save(self, path: Path) -> None:
        """Write the messages to a new file, as one line of JSON that the other commands read as a prompt.

        Raises:
            JetSpecError: there is nothing to write, the file exists, or it cannot be written.
        """
        if not self.turns:
            raise JetSpecError("there is nothing to save yet")
        if path.exists():
            raise JetSpecError(f"{path} exists; name another file")
        line = json.dumps({"messages": self.messages()}, ensure_ascii=False) + "\n"
        try:
            write_atomically(path, line.encode())
        except OSError as error:
            raise JetSpecError(f"cannot write {path}: {error}") from error
