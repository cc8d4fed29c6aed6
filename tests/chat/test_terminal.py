"""`jetspec chat` as a person uses it: keys on a pseudo terminal, and pipes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cli import call
from tests.helpers.openai_server import WAIT, FakeServer, delta, echo, fake_server, finish, usage

pexpect = pytest.importorskip("pexpect", reason="Windows has no pseudo terminals")

ROOT = Path(__file__).parents[2]
CTRL_C, CTRL_D, ALT_ENTER, UP, PASTE, END_PASTE = "\x03", "\x04", "\x1b\r", "\x1b[A", "\x1b[200~", "\x1b[201~"
#: prompt_toolkit would ask the terminal where its cursor is, and a pseudo terminal does not answer.
ENVIRONMENT = {**os.environ, "PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
TIMEOUT_S = 60

Start = Callable[..., Any]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as fake:
        yield fake


@pytest.fixture
def start() -> Iterator[Start]:
    """Start `jetspec chat` on a pseudo terminal."""
    children: list[Any] = []

    def start(*arguments: object) -> Any:
        command = ["-m", "jetspec", "chat", *map(str, arguments)]
        size = {"dimensions": (40, 100), "timeout": TIMEOUT_S, "encoding": "utf-8"}
        child = pexpect.spawn(sys.executable, command, cwd=str(ROOT), env=ENVIRONMENT, **size)
        child.delaybeforesend = 0
        children.append(child)
        return child

    yield start
    for child in children:
        child.close(force=True)


def type_in(child: Any, keys: str) -> None:
    """Type at the next prompt, which begins by asking for pasted text in brackets."""
    child.expect(re.escape("\x1b[?2004h"))
    child.send(keys)


def leave(child: Any, keys: str = "/quit\r") -> None:
    type_in(child, keys)
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


def test_a_conversation_with_a_server(server: FakeServer, start: Start, tmp_path: Path) -> None:
    server.answer = lambda body: [delta("I begin"), WAIT] if body["messages"][-1]["content"] == "tell" else echo(body)
    child = start("--url", server.url, "--api-key", "secret", "--system", "Be brief.", "--max-tokens", 9)
    child.expect("tiny at http.*/help lists the commands")
    type_in(child, "hello\r")
    child.expect(re.escape("You said hello (2)."))
    child.expect("4 tokens in .* tokens/s, acceptance length 1.50")
    # Two lines by Alt-Enter, a third by a backslash, and a fourth that is pasted.
    type_in(child, "one" + ALT_ENTER + "two\\\rthree " + PASTE + "four\nfive" + END_PASTE + "\r")
    child.expect(re.escape("You said five (4)."))
    assert server.requests[-1]["messages"][-1]["content"] == "one\ntwo\nthree four\nfive"
    # Ctrl-C ends the answer, and the next question carries what had come.
    type_in(child, "tell\r")
    child.expect("I begin")
    child.send(CTRL_C)
    child.expect("stopped after")
    type_in(child, "next\r")
    child.expect(re.escape("You said next (8)."))
    assert server.requests[-1]["messages"][-2] == {"role": "assistant", "content": "I begin"}
    # Ctrl-C at the prompt clears what is typed.
    type_in(child, "never sent" + CTRL_C)
    child.expect("Ctrl-D leaves")
    type_in(child, "/sa\t")
    child.expect("ve")  # completed
    child.send(f" {tmp_path / 'talk.jsonl'}\r")
    child.expect("written: ")
    type_in(child, "/nothing\r")
    child.expect("error: /nothing: no such command")
    type_in(child, "/reset\r")
    child.expect("starts anew")
    type_in(child, UP * 4 + "\r")
    child.expect(re.escape("You said next (2)."))
    leave(child)
    assert (tmp_path / "talk.jsonl").exists()
    assert set(server.keys) == {"Bearer secret"}
    assert {(body["model"], body["max_tokens"]) for body in server.requests} == {("tiny", 9)}


def test_errors_of_a_server_do_not_end_the_chat(server: FakeServer, start: Start) -> None:
    server.answer = lambda body: (503, {"error": {"message": "too busy"}})
    child = start("--url", server.url, "--model", "other")
    type_in(child, "hello\r")
    child.expect("error: .*503 Service Unavailable: too busy")
    server.answer = lambda body: [delta("\x1b]0;title\x07ok"), finish(), usage(1, 1)]
    type_in(child, "hello\r")
    child.expect("\ufffd]0;title\ufffdok")
    leave(child, CTRL_D)
    assert server.requests[-1]["messages"] == [{"role": "user", "content": "hello"}]


def test_keys_typed_before_the_prompt_are_not_lost(server: FakeServer, start: Start) -> None:
    child = start("--url", server.url)
    child.send("one" + ALT_ENTER + "two\r")
    child.expect(re.escape("You said two (1)."))
    assert server.requests[-1]["messages"][-1]["content"] == "one\ntwo"
    leave(child)


@pytest.mark.slow
def test_a_conversation_with_a_model(folder: Path, start: Start) -> None:
    child = start(folder / "target", "--draft", folder / "head", "--tree-budget", 4, "--max-tokens", 24)
    child.expect("float32 on cpu; /help lists the commands")
    type_in(child, "hello\r")
    child.expect(r"tokens in .* tokens/s, acceptance length \d")
    type_in(child, "/reset\r")
    child.expect("starts anew")
    type_in(child, "hello\r")
    child.expect(r"acceptance length \d")
    leave(child)


def pipe(*arguments: object, text: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jetspec", "chat", *map(str, arguments)]
    return subprocess.run(command, input=text, capture_output=True, text=True, cwd=ROOT, check=False, timeout=TIMEOUT_S)


def test_a_pipe_is_one_message(server: FakeServer) -> None:
    server.answer = lambda body: [delta("", reasoning="Hm."), delta("raw \x1b"), finish(), usage(2, 3)]
    done = pipe("--url", server.url, text="first line\n/help\n")
    assert (done.returncode, done.stdout) == (0, "raw \x1b\n")
    assert "3 tokens in" in done.stderr
    assert [body["messages"][-1]["content"] for body in server.requests] == ["first line\n/help"]


def test_a_pipe_to_a_local_model(folder: Path) -> None:
    local = ("--draft", folder / "head", "--max-tokens", 6)
    done = call("chat", folder / "target", *local, input="Hello\n")
    assert done.exit_code == 0, done.output
    expected = call("generate", "Hello", "--target", folder / "target", *local)
    assert done.stdout == expected.stdout
    assert "acceptance length" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "m"), "--model: is for a server; name it with --url"),
        (("--api-key", "k"), "--api-key: is for a server"),
        (("--url", "http://localhost:1", "some/model"), "TARGET: is for a model in this process"),
        (("--url", "http://localhost:1", "--draft", "none"), "--draft: is for a model in this process"),
        (("--url", "http://localhost:1", "--tree-budget", 4), "--tree-budget: is for a model in this process"),
        (("--url", "localhost:1"), "url='localhost:1': must be the address of a server"),
        (("/no/such/target",), "/no/such/target"),
    ],
)
def test_errors_are_one_line(arguments: tuple[object, ...], message: str) -> None:
    done = call("chat", *arguments, input="Hello")
    assert done.exit_code == 1
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def test_an_empty_pipe_is_no_message(server: FakeServer) -> None:
    done = call("chat", "--url", server.url, input=" \n")
    assert done.exit_code == 1
    assert "no message: standard input is empty" in done.stderr
    assert server.requests == []


def test_help_fits_80_columns() -> None:
    done = call("chat", "--help")
    assert done.exit_code == 0
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
