"""A chat without a terminal: questions, commands, errors, and answers that are stopped."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from jetspec.async_llm import AsyncLLM
from jetspec.chat.backends import LocalBackend, ServerBackend
from jetspec.chat.conversation import Conversation
from jetspec.chat.session import COMMANDS, Answer, Chat, printable, stopped_by_ctrl_c
from jetspec.client import Delta, OpenAIClient, Usage
from jetspec.errors import JetSpecError
from jetspec.llm import LLM
from jetspec.prompts import read_prompts
from jetspec.sampling import SamplingParams
from tests.helpers.openai_server import WAIT, delta, fake_server
from tests.helpers.tiny import tiny_target


class Parrot:
    """Repeats the last question, a word at a time; `hang` makes it wait after the first one."""

    def __init__(self) -> None:
        self.seen: list[list[dict[str, Any]]] = []
        self.hang = False
        self.error: Exception | None = None
        self.open = 0

    async def stream(self, messages: Sequence[dict[str, Any]]) -> AsyncGenerator[Delta, None]:
        self.seen.append(list(messages))
        self.open += 1
        try:
            if self.error is not None:
                raise self.error
            for word in messages[-1]["content"].split():
                yield Delta(word + " ")
                if self.hang:
                    await asyncio.Event().wait()
            yield Delta(finish_reason="stop")
        finally:
            self.open -= 1

    async def usage(self) -> Usage | None:
        return None if self.hang else Usage(5, 6, rounds=2, decoded_tokens=5)

    async def close(self) -> None:
        pass


class Paper:
    """A screen that keeps what was shown."""

    def __init__(self) -> None:
        self.answer = ""
        self.thought = ""
        self.notes: list[str] = []
        self.on_text: Callable[[], None] = lambda: None

    def text(self, piece: str) -> None:
        self.answer += piece
        self.on_text()

    def reasoning(self, piece: str) -> None:
        self.thought += piece

    def end(self) -> None:
        self.answer += "|"

    def note(self, line: str) -> None:
        self.notes.append(line)


def talk(*lines: str, backend: Any = None, system: str | None = None) -> tuple[Chat, Any, Paper]:
    """Say lines one after the other."""
    backend = backend or Parrot()
    chat = Chat(backend, Paper(), Conversation(system))

    async def run() -> None:
        for line in lines:
            await chat.say(line)

    asyncio.run(run())
    return chat, backend, chat.screen


def test_a_question_carries_what_was_said_before() -> None:
    chat, parrot, paper = talk("One two", "Three", system="Be a parrot.")
    system = {"role": "system", "content": "Be a parrot."}
    one, two = {"role": "user", "content": "One two"}, {"role": "assistant", "content": "One two "}
    assert parrot.seen == [[system, one], [system, one, two, {"role": "user", "content": "Three"}]]
    assert paper.answer == "One two |Three |"
    assert len(paper.notes) == 2
    assert "6 tokens in" in paper.notes[0]
    assert "acceptance length 2.50" in paper.notes[0]
    assert [turn["role"] for turn in chat.conversation.turns] == ["user", "assistant"] * 2


def test_the_figures_are_those_that_are_known() -> None:
    full = Answer("a", "length", first_s=0.25, total_s=2.0, usage=Usage(3, 10, 4, 9))
    assert full.summary() == (
        "10 tokens in 2.0 s, 5.0 tokens/s, acceptance length 2.25, first text after 0.25 s, "
        "cut off: --max-tokens or the context is used up"
    )
    assert Answer("a", "stop", first_s=0.5, total_s=2.0).summary() == "2.0 s, first text after 0.50 s"
    assert Answer("", total_s=1.0, stopped=True).summary() == "stopped after 1.0 s"
    assert Answer(usage=Usage(3, 1, 0, 0), total_s=0.5).summary() == "1 tokens in 0.5 s, 2.0 tokens/s"


def test_reset_forgets_all_but_the_system_message() -> None:
    _, parrot, paper = talk("One", "/reset", "Two", system="S")
    assert [m["content"] for m in parrot.seen[-1]] == ["S", "Two"]
    assert "the conversation starts anew" in paper.notes


def test_the_system_message_is_shown_set_and_removed() -> None:
    _, parrot, paper = talk("/system", "One", "/system Be brief.", "Two", "/system -", "Three")
    assert [[m["content"] for m in seen] for seen in parrot.seen] == [["One"], ["Be brief.", "Two"], ["Three"]]
    assert [note for note in paper.notes if note.startswith("system")] == [
        "system message: none",
        "system message: Be brief.",
        "system message: none",
    ]


def test_retry_asks_the_last_question_again() -> None:
    chat, parrot, _ = talk("One", "Two", "/retry")
    assert parrot.seen[2] == parrot.seen[1]
    assert len(chat.conversation.turns) == 4
    with pytest.raises(JetSpecError, match="there is no question yet"):
        talk("/retry")


def test_a_saved_conversation_is_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    talk("Gr\u00fc\u00dfe", f"/save {path}", system="S")
    assert json.loads(path.read_text(encoding="utf-8"))["messages"][1]["content"] == "Gr\u00fc\u00dfe"
    assert read_prompts(path) == [[{"role": "system", "content": "S"}, {"role": "user", "content": "Gr\u00fc\u00dfe"}]]
    with pytest.raises(JetSpecError, match="exists; name another file"):
        talk("Hi", f"/save {path}")
    for lines, message in {
        (f"/save {tmp_path}/new",): "nothing to save",
        ("Hi", "/save"): "name a file",
        ("Hi", f"/save {tmp_path}/no/folder"): "cannot write",
    }.items():
        with pytest.raises(JetSpecError, match=message):
            talk(*lines)


def test_help_names_every_command_and_each_of_them_works() -> None:
    _, _, paper = talk("/help")
    assert [note.split("  ")[0] for note in paper.notes[:-1]] == list(COMMANDS)
    assert "Ctrl-C" in paper.notes[-1]

    async def run(name: str) -> bool:
        chat = Chat(Parrot(), Paper())
        await chat.say("Hi")
        return await chat.say(name)

    for name in (command.split()[0] for command in COMMANDS if "FILE" not in command):
        assert asyncio.run(run(name)) is (name != "/quit")


def test_an_unknown_command_is_no_question() -> None:
    parrot = Parrot()
    with pytest.raises(JetSpecError, match="/rset: no such command; did you mean /reset;"):
        talk("/rset", backend=parrot)
    with pytest.raises(JetSpecError, match="/help lists the commands"):
        talk("/usr/bin", backend=parrot)
    assert parrot.seen == []
    talk(" /usr/bin is what?", backend=parrot)
    assert parrot.seen[0][0]["content"] == " /usr/bin is what?"


def test_a_question_that_failed_is_taken_back() -> None:
    parrot = Parrot()
    chat = Chat(parrot, Paper())

    async def run() -> None:
        parrot.error = JetSpecError("too long")
        with pytest.raises(JetSpecError, match="too long"):
            await chat.say("One")
        parrot.error = None
        await chat.say("Two")

    asyncio.run(run())
    assert [m["content"] for m in parrot.seen[-1]] == ["Two"]
    with pytest.raises(JetSpecError, match="not valid UTF-8"):
        talk("a\udcff", backend=parrot)
    assert len(parrot.seen) == 2


def stopped(backend: Any, *, on_text: bool = True) -> tuple[Chat, Answer, Answer | None]:
    """Ask, and stop the answer by Ctrl-C once its first text has come, or at once; then ask again where that ends."""
    paper = Paper()
    chat = Chat(backend, paper)

    async def run() -> tuple[Answer, Answer | None]:
        with stopped_by_ctrl_c(chat):
            os.kill(os.getpid(), signal.SIGINT)  # nothing is being answered: nothing happens
            await asyncio.sleep(0)
            paper.on_text = lambda: os.kill(os.getpid(), signal.SIGINT) if on_text else None
            first = await chat.ask("Tell me all")
            paper.on_text = lambda: None
            if not isinstance(backend, Parrot):
                return first, None
            backend.hang = False
            return first, await chat.ask("Again")

    before = signal.getsignal(signal.SIGINT)
    answers = asyncio.run(run())
    assert signal.getsignal(signal.SIGINT) is before
    return chat, *answers


def test_ctrl_c_stops_the_answer_and_not_the_chat() -> None:
    parrot = Parrot()
    parrot.hang = True
    chat, first, second = stopped(parrot)
    assert (first.text, first.stopped, first.usage) == ("Tell ", True, None)
    assert parrot.open == 0, "the stream is closed"
    assert second is not None
    assert (second.text, second.stopped) == ("Again ", False)
    assert [turn["content"] for turn in chat.conversation.turns] == ["Tell me all", "Tell ", "Again", "Again "]


def test_the_end_of_the_program_is_not_taken_for_ctrl_c() -> None:
    parrot = Parrot()
    parrot.hang = True

    async def run() -> None:
        chat = Chat(parrot, Paper())
        task = asyncio.create_task(chat.ask("Tell me all"))
        chat.screen.on_text = task.cancel
        with pytest.raises(asyncio.CancelledError):
            await task
        assert parrot.open == 0

    asyncio.run(run())


def test_a_local_answer_that_is_stopped_leaves_the_engine_and_has_figures() -> None:
    target = tiny_target("llama", text=True, max_position_embeddings=2048)

    async def run() -> None:
        llm = AsyncLLM(target, draft_method="ngram", draft="auto", tree_budget=4, num_blocks=200)
        backend = LocalBackend(llm, SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True))
        paper = Paper()
        chat = Chat(backend, paper)
        paper.on_text = chat.stop
        answer = await chat.ask("Hello")
        assert answer.stopped
        assert answer.text == paper.answer.removesuffix("|")
        assert answer.usage is not None
        assert 0 < answer.usage.completion_tokens < 1500
        assert not llm.llm.engine.has_work
        await backend.close()

    asyncio.run(run())


def test_a_local_answer_is_that_of_the_model() -> None:
    target = tiny_target("llama", text=True, max_position_embeddings=512)
    params = SamplingParams(temperature=0, max_tokens=12)
    messages = [{"role": "user", "content": "Hello"}]
    [expected] = LLM(target, None, num_blocks=60).chat(messages, params)

    async def run() -> tuple[Answer, list[dict[str, Any]]]:
        backend = LocalBackend(AsyncLLM(target, None, num_blocks=60), params)
        chat = Chat(backend, Paper())
        answer = await chat.ask("Hello")
        await backend.close()
        return answer, chat.conversation.turns

    answer, turns = asyncio.run(run())
    assert answer.text == expected.outputs[0].text
    assert turns[1]["content"] == answer.text
    assert answer.usage == Usage(
        expected.metrics.prompt_tokens, 12, expected.metrics.rounds, expected.metrics.decoded_tokens
    )


def test_an_answer_of_a_server_that_is_stopped_closes_its_connection() -> None:
    with fake_server() as server:
        server.answer = lambda body: [delta("", reasoning="Hm. "), delta("So"), WAIT]

        async def run() -> None:
            backend = ServerBackend(OpenAIClient(server.url), {"model": "tiny", "max_tokens": 5})
            paper = Paper()
            chat = Chat(backend, paper)
            paper.on_text = chat.stop
            answer = await chat.ask("Hello")
            assert (answer.text, answer.stopped, answer.usage) == ("So", True, None)
            assert paper.thought == "Hm. "
            await asyncio.get_running_loop().run_in_executor(None, server.left.wait, 10)
            await backend.close()

        asyncio.run(run())
        assert server.left.is_set()
        assert server.requests[0]["messages"] == [{"role": "user", "content": "Hello"}]
        assert server.requests[0]["max_tokens"] == 5


def test_control_characters_cannot_reach_the_terminal() -> None:
    assert printable("a\x1b[2Jb\x07\x9bc\r\n\td\x7f") == "a\ufffd[2Jb\ufffd\ufffdc\ufffd\n\td\ufffd"
    assert printable("Gr\u00fc\u00dfe, \u4f60\u597d \U0001f600") == "Gr\u00fc\u00dfe, \u4f60\u597d \U0001f600"
