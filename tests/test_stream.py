"""Streams: the pieces add up to the outputs, and leaving one early leaves nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest

from jetspec import LLM, JetSpecError, SamplingParams, StructuredOutputsParams
from jetspec.errors import RequestError
from jetspec.head import head_for_target
from jetspec.outputs import StreamOutput
from tests.helpers.tiny import tiny_target

GREEDY = SamplingParams(temperature=0, max_tokens=12)
TALK = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    target = tiny_target(text=True)
    head = head_for_target(target, num_layers=1, block_size=4, num_aux_layers=2, mask_token_id=271)
    return LLM(target, head, tree_budget=6, num_blocks=200)


def joined(pieces: Iterable[StreamOutput]) -> dict[tuple[int, int], tuple]:
    """Text, ids, log probabilities and finish reasons of every answer, by prompt and answer."""
    answers: dict[tuple[int, int], tuple] = {}
    for p in pieces:
        text, ids, logprobs, reasons = answers.get((p.prompt_index, p.answer_index), ("", [], [], []))
        assert reasons in ([], [None] * len(reasons)), "a piece after the last"
        answers[p.prompt_index, p.answer_index] = (
            text + p.text,
            ids + p.token_ids,
            logprobs + (p.logprobs or []),
            [*reasons, p.finish_reason],
        )
    return {key: (text, ids, logprobs, reasons[-1]) for key, (text, ids, logprobs, reasons) in answers.items()}


def expected(llm: LLM, outputs: list) -> dict[tuple[int, int], tuple]:
    return {
        (i, c.index): (c.text, c.token_ids, c.logprobs or [], c.finish_reason)
        for i, o in enumerate(outputs)
        for c in o.outputs
    }


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=1.4, seed=5, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=1, max_tokens=15, n=3, logprobs=2),
        [GREEDY, SamplingParams(temperature=1.2, seed=2, max_tokens=30, stop=["a", "e"])],
    ],
    ids=["greedy", "sampled", "several answers", "stop strings"],
)
def test_pieces_add_up_to_the_outputs(llm: LLM, params) -> None:
    pieces = joined(llm.stream(["one", "three"], params))
    assert pieces == expected(llm, llm.generate(["one", "three"], params))


def test_conversations_stream_too(llm: LLM) -> None:
    assert joined(llm.stream_chat(TALK, GREEDY)) == expected(llm, llm.chat(TALK, GREEDY))


def test_characters_come_whole(llm: LLM) -> None:
    text = "日本 😀é!"
    form = StructuredOutputsParams(choice=[text])
    pieces = [p.text for p in llm.stream("say it", SamplingParams(max_tokens=30, structured_outputs=form))]
    assert "".join(pieces) == text
    assert "" in pieces
    assert "\ufffd" not in "".join(pieces)


def test_refusals_come_at_once(llm: LLM) -> None:
    with pytest.raises(JetSpecError, match="prompt 1: prompt is empty"):
        llm.stream([[1, 2], []], GREEDY)
    with pytest.raises(JetSpecError, match="conversation"):
        llm.stream_chat([[]], GREEDY)


def test_leaving_early_cancels(llm: LLM) -> None:
    free = llm.engine.blocks.num_free
    for piece in llm.stream(["abc", "x"], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)):
        assert llm.engine.has_work
        if piece.prompt_index == 1:
            break
    assert not llm.engine.has_work
    assert llm.engine.blocks.num_free == free


def test_a_stream_nobody_reads_runs_nothing(llm: LLM) -> None:
    stream = llm.stream("abc", GREEDY)
    assert not llm.engine.has_work
    del stream
    assert not llm.engine.has_work


def test_streams_read_in_turns_lose_nothing(llm: LLM) -> None:
    long = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    first, second = llm.stream("abc", long), llm.stream(["x", "yz"], long)
    seen: tuple[list, list] = ([next(first)], [next(second)])
    between = llm.generate("between", GREEDY)
    while len(seen[0]) + len(seen[1]) < 8:
        seen[0].append(next(first))
        seen[1].append(next(second))
    seen[1].extend(second)
    seen[0].extend(first)
    assert joined(seen[0]) == expected(llm, llm.generate("abc", long))
    assert joined(seen[1]) == expected(llm, llm.generate(["x", "yz"], long))
    assert between[0].outputs == llm.generate("between", GREEDY)[0].outputs


def test_a_failed_request_is_told_at_the_end(llm: LLM) -> None:
    def explode(ids, scores):
        raise RuntimeError("boom")

    pieces = []
    with pytest.raises(RequestError, match=r"prompt 0: .*boom") as caught:
        pieces.extend(llm.stream(["abc", "x"], [SamplingParams(logits_processors=[explode]), GREEDY]))
    assert [o.outputs[0].finish_reason for o in caught.value.outputs] == ["error", "length"]
    assert [p.finish_reason for p in pieces if p.prompt_index == 0] == ["error"]


def test_an_engine_that_fails_holds_nothing_back(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    free = llm.engine.blocks.num_free

    def crash(*args):
        raise RuntimeError("crash")

    stream = llm.stream("abc", SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.drafter, "propose", crash)
        with pytest.raises(JetSpecError, match=r"Drafter failed: RuntimeError\('crash'\)"):
            next(stream)
    assert not llm.engine.has_work
    assert llm.engine.blocks.num_free == free


def test_a_stream_that_is_closed_within_a_round_ends_after_it(llm: LLM) -> None:
    """As when the garbage collector comes by while a processor runs."""
    left = llm.stream("abc", SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    next(left)

    def close(ids, scores):
        left.close()
        return scores

    params = SamplingParams(temperature=0, max_tokens=12, logits_processors=[close])
    assert llm.generate("x", params)[0].outputs == llm.generate("x", GREEDY)[0].outputs
    assert not llm.engine.has_work


def test_n_answers_start_together_or_not_at_all(llm: LLM) -> None:
    llm.engine.add("taken/2", [1], SamplingParams())
    [request] = llm.prepare("abc", SamplingParams(n=3))
    request.request_id = "taken"
    with pytest.raises(JetSpecError, match="request_id='taken/2'"):
        llm.dispatcher.start(request, print)
    assert llm.engine.cancel("taken") is None
    assert llm.engine.cancel("taken/2") is not None
    assert not llm.engine.has_work


def test_a_stream_ends_with_its_last_piece_whichever_thread_ran_the_round(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread's round ends the answer, but has not handed its last piece over when the stream is read."""
    long = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, n=1)
    stream = llm.stream("abc", long)
    pieces = [next(stream)]
    request_id = pieces[0].request_id
    ended, read = threading.Event(), threading.Event()
    step, turn, cancel = llm.engine.step, llm.dispatcher.step, llm.dispatcher.cancel

    def slow_step() -> list:
        outputs = step()
        if any(o.sequence.request_id == request_id and o.sequence.finished for o in outputs):
            ended.set()
            assert read.wait(60)
        return outputs

    def noted(call: Callable) -> Callable:
        """Lets the other thread's round go on once this thread has decided what to do."""

        def noting(*args: object) -> None:
            if threading.current_thread() is threading.main_thread():
                read.set()
            call(*args)

        return noting

    monkeypatch.setattr(llm.engine, "step", slow_step)
    monkeypatch.setattr(llm.dispatcher, "step", noted(turn))
    monkeypatch.setattr(llm.dispatcher, "cancel", noted(cancel))
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(llm.generate, "other", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
        assert ended.wait(60)
        pieces.extend(stream)
        other.result(60)
    monkeypatch.undo()
    assert joined(pieces) == expected(llm, llm.generate("abc", long))
