"""Prompt sources: the rows of a file or of a hub dataset. No other module knows their fields.

- ``.jsonl``: an object a line; ``.json``: an array of objects or texts (or lines, as in ``.jsonl``).
- ``hub:owner/name[/config][:split[:column]]``: a dataset, through the library ``datasets``.
- Any other file: plain text with one prompt a line.

An object holds its prompt under ``prompt``, ``question`` or ``text`` (a string), ``messages`` or ``conversations``
(turns of ``role`` and ``content`` as in OpenAI's API, or of ``from`` and ``value`` as in ShareGPT) or
``prompt_token_ids``; the tools that a conversation may call under ``tools``; and an answer to the prompt under
``response`` (a string) or ``response_token_ids``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from jetspec.errors import JetSpecError

#: One turn of a conversation, as chat templates take it: `role`, `content` and whatever else the template reads.
Message = dict[str, Any]
#: A text, the token ids of one, or a conversation.
PromptInput = str | list[int] | list[Message]

HUB = "hub:"
TEXT_FIELDS = ("prompt", "question", "text")
TURN_FIELDS = ("messages", "conversations")
SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt"), "assistant"),
    **{name: name for name in ("system", "tool")},
}
#: Bad rows that a message shows.
SHOWN = 5


@dataclass(frozen=True)
class Row:
    """One row of a source. ``where`` names it in error messages."""

    where: str
    prompt: PromptInput
    response: str | list[int] | None = None
    tools: list[Any] | None = None


@dataclass
class BadRows:
    """Collects the errors of rows, so that all of them are reported at once.

    Args:
        skip: leave out rows with errors and warn about them, instead of raising an error.
        errors: the errors so far, each with the place of its row.
    """

    skip: bool = False
    errors: list[str] = field(default_factory=list)

    @contextmanager
    def at(self, where: str) -> Iterator[None]:
        """Catch a JetSpecError raised in the context, and keep it as an error of the row ``where``."""
        try:
            yield
        except JetSpecError as error:
            self.errors.append(f"{where}: {error}")

    def raise_if_any(self, say: Callable[[str], None] | None = None, fix: str = "mend them") -> None:
        """Report the errors collected since the last call.

        Args:
            say: called with a warning, where rows with errors are skipped.
            fix: what the error advises the user to do.

        Raises:
            JetSpecError: there are errors and rows are not skipped. It lists the first few and says how many there are.
        """
        errors, self.errors = self.errors, []
        if not errors:
            return
        listed = errors[:SHOWN] + ([f"and {len(errors) - SHOWN} more"] if len(errors) > SHOWN else [])
        if not self.skip:
            if len(errors) == 1:
                raise JetSpecError(errors[0])
            raise JetSpecError("\n  ".join([f"{len(errors)} rows cannot be used; {fix}:", *listed]))
        if say is not None:
            say("\n  ".join([f"warning: skipped {len(errors)} rows that cannot be used:", *listed]))


def read_rows(source: str | Path, bad: BadRows) -> list[Row]:
    """Read the rows of a source. Rows with errors are left out, and ``bad`` collects the errors.

    Raises:
        JetSpecError: the source cannot be read, or holds no row at all.
    """
    rows = []
    for where, entry in read_entries(source):
        with bad.at(where):
            rows.append(_row(where, as_record(entry)))
    return rows


def read_entries(source: str | Path) -> list[tuple[str, Any]]:
    """Read (where, entry) for each row of a source, whatever its fields; `as_record` gives the fields of an entry.

    Raises:
        JetSpecError: the source cannot be read, or holds no row at all.
    """
    entries = _hub_entries(str(source)) if str(source).startswith(HUB) else _file_entries(Path(source))
    found = list(entries)
    if not found:
        raise JetSpecError(f"prompts: {source} holds none; give a source with at least one prompt")
    return found


def as_record(entry: Any) -> dict[str, Any]:
    """The fields of an entry that have a value (not null).

    Raises:
        JetSpecError: the entry is not a JSON object.
    """
    if isinstance(entry, str):
        try:
            entry = json.loads(entry)
        except ValueError as error:
            raise JetSpecError(f"not valid JSON: {error}") from error
    if not isinstance(entry, dict):
        raise JetSpecError("not a JSON object")
    return _present(entry)


def read_prompts(source: str | Path) -> list[PromptInput]:
    """Read the prompts of a file or a hub dataset, without their answers.

    Raises:
        JetSpecError: the source cannot be read or holds no prompt, or one of its rows cannot be used.
    """
    bad = BadRows()
    rows = read_rows(source, bad)
    for row in rows:
        if row.tools is not None:
            bad.errors.append(f"{row.where}: tools: only training takes them; remove the field")
    bad.raise_if_any()
    return [open_prompt(row.prompt) for row in rows]


def is_conversation(prompt: PromptInput) -> TypeGuard[list[Message]]:
    """Whether a prompt is a conversation, neither a text nor token ids."""
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], Mapping)


def is_answer(turn: Message) -> bool:
    """Whether a turn is text by the assistant, and not a tool call."""
    return turn["role"] == "assistant" and bool(turn.get("content")) and not turn.get("tool_calls")


def open_prompt(prompt: PromptInput) -> PromptInput:
    """A prompt without its answer: a conversation loses the assistant's turns at its end."""
    if not is_conversation(prompt):
        return prompt
    turns = list(prompt)
    while turns[-1]["role"] == "assistant":
        turns.pop()
    return turns


def shown(prompt: PromptInput) -> str:
    """A prompt on one line, for display: the text, or the last message of a conversation."""
    if is_conversation(prompt):
        prompt = str(prompt[-1].get("content"))
    return " ".join(prompt.split()) if isinstance(prompt, str) else str(prompt)


def _file_entries(path: Path) -> Iterator[tuple[str, Any]]:
    """(where, a JSON text to be decoded or a value that is decoded)."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise JetSpecError(f"cannot read prompts from {path}: {error}") from error
    if path.suffix == ".json" and text.lstrip().startswith("["):
        yield from _array_entries(path, text)
        return
    is_json = path.suffix in (".json", ".jsonl")
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"{path}, line {number}", line if is_json else {"prompt": line.removesuffix("\r")}


def _array_entries(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Items of an array with the lines they start in."""
    decoder, blank = json.JSONDecoder(), re.compile(r"[\s,]*")
    at, line, counted = text.index("[") + 1, 1, 0
    try:
        json.loads(text)
    except ValueError as error:
        raise JetSpecError(f"{path}: not valid JSON: {error}") from error
    while text[at := blank.match(text, at).end()] != "]":  # type: ignore[union-attr]
        line, counted = line + text.count("\n", counted, at), at
        value, at = decoder.raw_decode(text, at)
        yield f"{path}, line {line}", {"prompt": value} if isinstance(value, str) else value


def _hub_entries(source: str) -> Iterator[tuple[str, Any]]:
    match = re.fullmatch(r"hub:([^/:]+/[^/:]+)(?:/([^:]+))?(?::([^:\[\]]+(?:\[[^\]]*\])?)(?::(.+))?)?", source)
    if match is None:
        raise JetSpecError(f"prompts={source}: write hub:owner/name[/config][:split[:column]]")
    name, config, split, column = match.groups()
    try:
        import datasets
    except ImportError as error:
        raise JetSpecError(
            f"prompts={source}: needs the library datasets; pip install 'jetspec[train]' or 'jetspec[bench]'"
        ) from error
    try:
        rows = datasets.load_dataset(name, config, split=split or "train")
    except Exception as error:  # of many kinds, for names, splits, formats and the network
        raise JetSpecError(f"prompts={source}: cannot load the dataset: {error}") from error
    if column is not None and column not in rows.column_names:
        raise JetSpecError(f"prompts={source}: no column {column!r}; there are {', '.join(rows.column_names)}")
    for number, row in enumerate(rows):
        value = row if column is None else row[column]
        if column is not None:
            value = {"prompt" if isinstance(value, str) else "messages": value}
        yield f"{source}, row {number}", value


def _row(where: str, record: dict[str, Any]) -> Row:
    response: str | list[int] | None = None
    if "response_token_ids" in record:
        response = _ids(record, "response_token_ids")
    elif "response" in record:
        response = _text(record, "response")
    for name in TURN_FIELDS:
        if name in record and "prompt_token_ids" not in record:
            turns = _turns(record[name], name)
            if response is not None and turns[-1]["role"] == "assistant":
                raise JetSpecError(f"response: {name} ends with the assistant's turn already; remove one of them")
            return Row(where, turns, response, record.get("tools"))
    if "prompt_token_ids" in record:
        return Row(where, _ids(record, "prompt_token_ids"), response)
    for name in TEXT_FIELDS:
        if name in record:
            return Row(where, _text(record, name), response)
    fields = ", ".join((*TEXT_FIELDS, *TURN_FIELDS, "prompt_token_ids"))
    raise JetSpecError(f"no prompt: give one of {fields}; there are {', '.join(map(str, record)) or 'no fields'}")


def _present(record: dict[str, Any]) -> dict[str, Any]:
    """The fields that are not null. Tables hold nulls where a row has no such field."""
    return {name: value for name, value in record.items() if value is not None}


def _text(record: dict[str, Any], name: str) -> str:
    value = record[name]
    if not isinstance(value, str) or not value:
        raise JetSpecError(f"{name}: must be a text that is not empty, got {value!r:.80}")
    return value


def _ids(record: dict[str, Any], name: str) -> list[int]:
    value = record[name]
    if not isinstance(value, list) or not value or any(type(i) is not int or i < 0 for i in value):
        raise JetSpecError(f"{name}: must be a list of token ids that is not empty")
    return value


def _turns(value: Any, name: str) -> list[Message]:
    if not isinstance(value, Iterable) or isinstance(value, str | dict) or not (turns := list(value)):
        raise JetSpecError(f"{name}: must be a list of turns that is not empty")
    messages = [_turn(turn, f"{name}[{index}]") for index, turn in enumerate(turns)]
    first = next((m for m in messages if m["role"] != "system"), None)
    if first is None or first["role"] == "assistant":
        raise JetSpecError(f"{name}: no turn before the assistant's")
    return messages


def _turn(turn: Any, where: str) -> Message:
    """A turn as chat templates take it: ``role``, ``content`` and whatever else it holds."""
    if not isinstance(turn, dict):
        raise JetSpecError(f"{where}: must be an object")
    message = _present(turn)
    if "role" not in message and "from" in message:
        sender = message.pop("from")
        if not isinstance(sender, str) or sender not in SHAREGPT_ROLES:
            raise JetSpecError(f"{where}: from={sender!r:.80}: one of {', '.join(SHAREGPT_ROLES)}")
        message = {"role": SHAREGPT_ROLES[sender], "content": message.pop("value", None), **message}
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        message["content"] = content = "".join(part["text"] for part in content)
    if not isinstance(message.get("role"), str) or not (isinstance(content, str) or message.get("tool_calls")):
        raise JetSpecError(f"{where}: must be an object with the texts 'role' and 'content' (or 'from' and 'value')")
    if message["role"] == "assistant" and not content and not message.get("tool_calls"):
        raise JetSpecError(f"{where}: the assistant's turn is empty")
    return message
