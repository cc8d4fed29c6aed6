"""The dispatcher: what it hands over, wherever a cancel or an error comes between."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

import jetspec.dispatcher
from jetspec.dispatcher import Dispatcher, Request
from jetspec.errors import JetSpecError
from jetspec.outputs import StreamOutput
from jetspec.sampling import SamplingParams

PARAMS = SamplingParams(max_tokens=3)


class FakeSequence:
    """A sequence that counts its tokens up and spells each with a letter."""

    def __init__(self, request_id: str, params: SamplingParams) -> None:
        self.request_id, self.params = request_id, params
        self.prompt_ids = [0]
        self.token_ids = [0]
        self.logprobs: list = []
        self.prompt_logprobs: list = [None]
        self.finish_reason: str | None = None
        self.stop_reason = None
        self.error: Exception | None = None
        self.text = ""
        self.taken = 0

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[1:]

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - 1

    def append(self) -> None:
        self.token_ids.append(len(self.token_ids))
        self.text += "abcdefghij"[self.num_output]
        if self.num_output == self.params.max_tokens:
            self.finish_reason = "length"

    def take_text(self) -> str:
        new, self.taken = self.text[self.taken :], len(self.text)
        return new


class FakeEngine:
    """One token a round for every sequence. A round that `crash` ends gives tokens, but returns no outputs."""

    def __init__(self) -> None:
        self.sequences: dict[str, FakeSequence] = {}
        self.target = SimpleNamespace(tokenizer=None)
        self.crash: Exception | None = None

    def add(self, request_id: str, prompt_ids: list[int], params: SamplingParams) -> FakeSequence:
        self.sequences[request_id] = FakeSequence(request_id, params)
        return self.sequences[request_id]

    def cancel(self, request_id: str) -> FakeSequence | None:
        sequence = self.sequences.pop(request_id, None)
        if sequence is not None:
            sequence.finish_reason = "abort"
        return sequence

    def step(self) -> list[SimpleNamespace]:
        running = list(self.sequences.values())
        for sequence in running:
            sequence.append()
        outputs = [SimpleNamespace(sequence=s, new_token_ids=s.token_ids[-1:], new_text=s.take_text()) for s in running]
        if self.crash is not None:
            raise self.crash
        for sequence in running:
            if sequence.finished:
                del self.sequences[sequence.request_id]
        return outputs


def started(dispatcher: Dispatcher, name: str, params: SamplingParams = PARAMS) -> tuple[Request, list[StreamOutput]]:
    request, pieces = Request(name, None, [0], params), []
    dispatcher.start(request, pieces.append)
    return request, pieces


def in_time(body: Callable[[], Any]) -> Any:
    """The result of `body`, run in a thread of its own so that a deadlock fails the test instead of hanging it."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(body()), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "deadlock"
    assert results, "the thread raised an error"
    return results[0]


def joined(pieces: list[StreamOutput]) -> tuple[str, list[int], str | None]:
    assert [p.finish_reason is None for p in pieces] == [True] * (len(pieces) - 1) + [False]
    return "".join(p.text for p in pieces), [t for p in pieces for t in p.token_ids], pieces[-1].finish_reason


def count_instructions(body: Callable[[], None], at: int, interrupt: Callable[[], None]) -> int:
    """Run `body` and call `interrupt` before the `at`-th instruction of the dispatcher, as a garbage collector may.

    Returns how many instructions of the dispatcher were run.
    """
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename != jetspec.dispatcher.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            count += 1
            if count == at:
                interrupt()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        body()
    finally:
        sys.settrace(before)
    return count


def test_a_cancel_may_come_at_any_instruction() -> None:
    """The garbage collector closes a stream wherever it likes, also while the dispatcher takes or leaves its lock."""

    def run(at: int) -> int:
        dispatcher = Dispatcher(FakeEngine())  # type: ignore[arg-type]
        left, pieces = started(dispatcher, "left", SamplingParams(max_tokens=9))
        other, others = started(dispatcher, "other")

        def body() -> None:
            started(dispatcher, "late", SamplingParams(max_tokens=1))
            while not other.finished:
                dispatcher.step()
            dispatcher.cancel(other)

        count = count_instructions(body, at, lambda: dispatcher.cancel(left))
        if 0 < at <= count:
            assert joined(pieces)[2] == "abort"
            assert joined(pieces)[1] == left.answers[0].output_ids
            assert not dispatcher.engine.sequences  # type: ignore[attr-defined]
        assert joined(others) == ("bcd", [1, 2, 3], "length")
        return count

    total = in_time(lambda: run(0))
    assert total > 100
    in_time(lambda: [run(at) for at in range(1, total + 1)])


def test_a_cancel_from_another_thread_waits_for_no_round() -> None:
    dispatcher = Dispatcher(FakeEngine())  # type: ignore[arg-type]
    request, pieces = started(dispatcher, "left")
    real = dispatcher.engine.step
    cancelled: list[bool] = []

    def step() -> list[Any]:
        outputs = real()
        thread = threading.Thread(target=dispatcher.cancel, args=(request,), daemon=True)
        thread.start()
        thread.join(30)
        cancelled.append(not thread.is_alive())
        return outputs

    dispatcher.engine.step = step  # type: ignore[method-assign]
    dispatcher.step()
    assert cancelled == [True]
    assert joined(pieces) == ("b", [1], "abort")


def test_an_answer_that_ended_in_a_round_that_failed_is_handed_over_whole() -> None:
    """Nobody else would: the engine does not return it again."""
    dispatcher = Dispatcher(FakeEngine())  # type: ignore[arg-type]
    _, ended = started(dispatcher, "ended", SamplingParams(max_tokens=2))
    running, going = started(dispatcher, "running", SamplingParams(max_tokens=9))
    dispatcher.step()
    dispatcher.engine.crash = RuntimeError("crash")  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="crash"):
        dispatcher.step()
    assert joined(ended)[:2] == ("bc", [1, 2])
    assert [p.finish_reason for p in going] == [None]
    dispatcher.engine.crash = None  # type: ignore[attr-defined]
    dispatcher.step()
    dispatcher.cancel(running)
    assert joined(going) == ("bcd", [1, 2, 3], "abort")


def test_an_answer_that_is_cancelled_on_the_engine_itself_ends() -> None:
    dispatcher = Dispatcher(FakeEngine())  # type: ignore[arg-type]
    _, pieces = started(dispatcher, "left")
    dispatcher.step()
    dispatcher.engine.cancel("left")
    dispatcher.step()
    assert joined(pieces) == ("b", [1], "abort")


def test_calls_from_within_a_round_are_refused() -> None:
    dispatcher = Dispatcher(FakeEngine())  # type: ignore[arg-type]
    _, pieces = started(dispatcher, "x")
    errors: list[str] = []

    def receive(piece: StreamOutput) -> None:
        for call in (dispatcher.step, lambda: started(dispatcher, "y")):
            with pytest.raises(JetSpecError, match="cannot be called from its own") as caught:
                call()
            errors.append(str(caught.value))

    dispatcher.start(Request("z", None, [0], PARAMS), receive)
    dispatcher.step()
    assert len(errors) == 2
    assert len(pieces) == 1
