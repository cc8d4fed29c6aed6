"""Requests from an event loop: the same answers as `LLM`, and none that another one's end can harm."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine

import pytest

from jetspec import LLM, AsyncLLM, JetSpecError, SamplingParams
from jetspec.engine import Engine
from jetspec.errors import EngineError, RequestError
from jetspec.head import DraftHead, head_for_target
from jetspec.models.target import Target
from jetspec.sampling import StructuredOutputsParams
from tests.helpers.tiny import tiny_target

GREEDY = SamplingParams(temperature=0, max_tokens=10)
ENDLESS = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
TALK = [{"role": "user", "content": "hi"}]
SETTINGS = {"tree_budget": 6, "num_blocks": 200}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(text=True)


@pytest.fixture(scope="module")
def head(target: Target) -> DraftHead:
    return head_for_target(target, num_layers=1, block_size=4, num_aux_layers=2, mask_token_id=271)


@pytest.fixture(scope="module")
def llm(target: Target, head: DraftHead) -> LLM:
    return LLM(target, head, **SETTINGS)


@pytest.fixture
def run(target: Target, head: DraftHead) -> Callable:
    """Runs a coroutine function with an open AsyncLLM; afterwards nothing may be left of any request."""

    def call(body: Callable[[AsyncLLM], Coroutine], **settings) -> None:
        async def main() -> None:
            async with AsyncLLM(target, head, **{**SETTINGS, **settings}) as llm:
                await asyncio.wait_for(body(llm), 300)
            assert not llm._engine.is_alive()
            assert not llm._handles
            assert not llm.llm.engine.has_work
            assert llm.llm.engine.blocks.num_free == llm.llm.engine.blocks.num_blocks

        asyncio.run(main())

    return call


async def idle(engine: Engine) -> None:
    """Wait until the engine has nothing to run."""
    while engine.has_work:
        await asyncio.sleep(0.01)


def explode(ids, scores):
    raise RuntimeError("boom")


def test_many_requests_get_what_llm_gives_them(run: Callable, llm: LLM) -> None:
    form = StructuredOutputsParams(regex=r"[a-z]{4}-\d{2}")
    params = [SamplingParams(temperature=i % 3 / 2, seed=i, max_tokens=5 + 3 * i) for i in range(9)]
    params += [
        SamplingParams(n=3, seed=7, max_tokens=12),
        SamplingParams(seed=1, max_tokens=20, structured_outputs=form),
        SamplingParams(temperature=0, max_tokens=30, stop=["a", "e", "i"]),
    ]
    prompts = [f"{i} tell me" * (1 + i % 4) for i in range(len(params))]
    outputs = llm.generate(prompts, params)
    expected = [[(c.text, c.token_ids, c.finish_reason) for c in o.outputs] for o in outputs]

    async def streamed(llm: AsyncLLM, prompt: str, p: SamplingParams) -> list[tuple[str, list[int], str | None]]:
        answers = [("", [], None)] * p.n
        async for piece in llm.generate(prompt, p):
            text, ids, reason = answers[piece.answer_index]
            assert reason is None
            answers[piece.answer_index] = (text + piece.text, ids + piece.token_ids, piece.finish_reason)
        return answers

    async def whole(llm: AsyncLLM, prompt: str, p: SamplingParams) -> list:
        output = await (await llm.submit(prompt, p)).result()
        assert output.finished
        assert output.prompt == prompt
        return [(c.text, c.token_ids, c.finish_reason) for c in output.outputs]

    async def body(llm: AsyncLLM) -> None:
        jobs = [kind(llm, *job) for kind in (streamed, whole) for job in zip(prompts, params, strict=True)]
        answers = await asyncio.gather(*jobs)
        assert answers == expected * 2

    run(body, num_blocks=60)


def test_conversations(run: Callable, llm: LLM) -> None:
    [expected] = llm.chat(TALK, GREEDY)

    async def body(llm: AsyncLLM) -> None:
        assert "".join([piece.text async for piece in llm.chat(TALK, GREEDY)]) == expected.outputs[0].text
        output = await (await llm.submit_chat(TALK, GREEDY, request_id="talk")).result()
        with pytest.raises(JetSpecError, match="does not use 'tokenize'"):  # so they reach it
            await llm.submit_chat(TALK, GREEDY, chat_template_kwargs={"tokenize": True})
        with pytest.raises(JetSpecError, match="does not use 'tokenize'"):
            _ = [piece async for piece in llm.chat(TALK, GREEDY, chat_template_kwargs={"tokenize": True})]
        assert output.outputs == expected.outputs
        assert output.request_id == "talk"

    run(body)


def test_cancel_frees_blocks_and_leaves_others_alone(run: Callable, llm: LLM) -> None:
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    [expected] = llm.generate("other", long)

    async def body(llm: AsyncLLM) -> None:
        other = await llm.submit("other", long)
        first, second = [await llm.submit("abc", ENDLESS, request_id=name) for name in ("first", "second")]
        pieces = aiter(first)
        assert (await anext(pieces)).request_id == "first"
        assert await llm.cancel("first")
        second.cancel()
        for handle in (first, second):
            output = await handle.result()
            assert output.outputs[0].finish_reason == "abort"
            assert len(output.outputs[0].token_ids) < 200
        assert [p.finish_reason async for p in pieces][-1] == "abort"
        assert (await other.result()).outputs == expected.outputs
        assert not await llm.cancel("first")
        await idle(llm.llm.engine)
        assert llm.llm.engine.blocks.num_free == 200

    run(body)


def test_a_consumer_that_leaves_cancels_its_request(run: Callable) -> None:
    async def leave(llm: AsyncLLM) -> None:
        async for _ in llm.generate("abc", ENDLESS):
            break

    async def leave_handle(llm: AsyncLLM) -> None:
        async for _ in await llm.submit("abc", ENDLESS):
            break

    async def fail(llm: AsyncLLM) -> None:
        async for _ in await llm.submit("abc", ENDLESS):
            raise KeyError

    async def body(llm: AsyncLLM) -> None:
        await leave(llm)
        await leave_handle(llm)
        with pytest.raises(KeyError):
            await fail(llm)
        gc.collect()
        for consume in (read_all, await_result):
            task = asyncio.create_task(consume(llm, ENDLESS))
            while not llm._handles:
                await asyncio.sleep(0)
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        for handle in list(llm._handles.values()):
            assert (await handle.result()).outputs[0].finish_reason == "abort"
        await idle(llm.llm.engine)
        assert llm.llm.engine.blocks.num_free == 200

    run(body)


async def read_all(llm: AsyncLLM, params: SamplingParams) -> list[int]:
    return [token async for piece in llm.generate("abc", params) for token in piece.token_ids]


async def await_result(llm: AsyncLLM, params: SamplingParams) -> list[int]:
    return (await (await llm.submit("abc", params)).result()).outputs[0].token_ids


def test_a_failing_request_harms_only_itself(run: Callable, llm: LLM) -> None:
    [expected] = llm.generate("abc", GREEDY)

    async def body(llm: AsyncLLM) -> None:
        bad = SamplingParams(logits_processors=[explode])
        results = await asyncio.gather(
            read_all(llm, bad),
            read_all(llm, GREEDY),
            await_result(llm, bad),
            await_result(llm, GREEDY),
            return_exceptions=True,
        )
        for error in results[::2]:
            assert isinstance(error, RequestError)
            assert "boom" in str(error)
            assert error.outputs[0].outputs[0].finish_reason == "error"
        assert results[1::2] == [expected.outputs[0].token_ids] * 2

    run(body)


def test_refused_requests_never_run(run: Callable) -> None:
    async def body(llm: AsyncLLM) -> None:
        for prompt, params, message in (
            ([], GREEDY, "prompt is empty"),
            ([4000], GREEDY, "4000"),
            (["a", "b"], GREEDY, "token ids"),
            ("a", [GREEDY, GREEDY], "params"),
            ("a", SamplingParams(structured_outputs=StructuredOutputsParams(regex="(")), "structured_outputs"),
        ):
            with pytest.raises(JetSpecError, match=message):
                await llm.submit(prompt, params)
        with pytest.raises(JetSpecError, match="conversation"):
            await llm.submit_chat([], GREEDY)
        running = await llm.submit("abc", ENDLESS, request_id="x")
        with pytest.raises(JetSpecError, match="request_id='x'"):
            await llm.submit("abc", GREEDY, request_id="x")
        await llm.submit("abc", ENDLESS, request_id="y/1")
        several = await llm.submit("a", SamplingParams(n=2), request_id="y")
        with pytest.raises(JetSpecError, match=r"^request_id='y/1'"):
            await several.result()
        running.cancel()

    run(body)


def test_reading_twice_and_late(run: Callable, llm: LLM) -> None:
    [expected] = llm.generate("abc", GREEDY)

    async def body(llm: AsyncLLM) -> None:
        handle = await llm.submit("abc", GREEDY)
        output = await handle.result()
        assert (await handle.result()).outputs == output.outputs == expected.outputs
        assert "".join([p.text async for p in handle]) == expected.outputs[0].text
        assert [p async for p in handle] == []

    run(body)


def test_a_slow_reader_does_not_hold_up_the_engine(run: Callable) -> None:
    async def body(llm: AsyncLLM) -> None:
        slow = await llm.submit("abc", SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
        pieces = aiter(slow)
        await anext(pieces)
        await slow.wait()  # ends although nobody reads on
        assert [p.finish_reason async for p in pieces][-1] == "length"

    run(body)


def test_close_aborts_what_runs(target: Target, head: DraftHead) -> None:
    async def main() -> None:
        llm = AsyncLLM(target, head, **SETTINGS)
        handles = [await llm.submit("abc", ENDLESS) for _ in range(3)]
        reader = asyncio.create_task(read_all(llm, ENDLESS))
        await anext(aiter(handles[0]))
        await llm.close()
        for handle in handles:
            assert (await handle.result()).outputs[0].finish_reason == "abort"
        with pytest.raises(EngineError, match="closed"):
            await llm.submit("abc", GREEDY)
        await asyncio.wait([reader])
        await llm.close()
        assert not llm.llm.engine.has_work
        assert llm.llm.engine.blocks.num_free == 200

    asyncio.run(main())


def test_a_crash_is_told_to_everyone(target: Target, head: DraftHead) -> None:
    async def main() -> None:
        async with AsyncLLM(target, head, **SETTINGS) as llm:
            healthy = await (await llm.submit("abc", GREEDY)).result()
            assert healthy.finished

            def crash(*args):
                raise RuntimeError("no draft today")

            llm.llm.engine.drafter.propose = crash
            results = await asyncio.gather(
                read_all(llm, ENDLESS), await_result(llm, ENDLESS), read_all(llm, ENDLESS), return_exceptions=True
            )
            assert [type(r) for r in results] == [EngineError] * 3
            assert len(set(map(id, results))) == 3
            assert all("no draft today" in str(r) and isinstance(r.__cause__, JetSpecError) for r in results)
            with pytest.raises(EngineError, match="no draft today"):
                await llm.submit("abc", GREEDY)
        assert llm.llm.engine.blocks.num_free == 200

    asyncio.run(main())


@pytest.mark.parametrize("error", [KeyboardInterrupt(), GeneratorExit()])
def test_whatever_ends_the_engine_is_told_to_everyone(target: Target, head: DraftHead, error: BaseException) -> None:
    def end(*args):
        raise error

    async def main() -> None:
        async with AsyncLLM(target, head, **SETTINGS) as llm:
            llm.llm.engine.drafter.propose = end
            results = await asyncio.gather(read_all(llm, ENDLESS), await_result(llm, ENDLESS), return_exceptions=True)
            assert [type(r) for r in results] == [EngineError] * 2
        assert llm.llm.engine.blocks.num_free == 200

    asyncio.run(asyncio.wait_for(main(), 300))


@pytest.mark.parametrize("error", [KeyError("k"), SystemExit(3), asyncio.CancelledError()])
def test_what_a_processor_raises_ends_its_request_alone(run: Callable, llm: LLM, error: BaseException) -> None:
    [expected] = llm.generate("other", GREEDY)

    def fail(ids, scores):
        raise error

    async def body(llm: AsyncLLM) -> None:
        other = await llm.submit("other", GREEDY)
        bad = await llm.submit("abc", SamplingParams(logits_processors=[fail]))
        with pytest.raises(RequestError, match=type(error).__name__):
            await bad.result()
        assert (await other.result()).outputs == expected.outputs

    run(body)


@pytest.mark.parametrize("prompt", [5, True, None, b"abc", {"prompt": "abc"}, [True]])
def test_what_is_no_prompt_is_refused(run: Callable, prompt: object) -> None:
    async def body(llm: AsyncLLM) -> None:
        with pytest.raises(JetSpecError, match="text or a list of token ids"):
            await llm.submit(prompt)

    run(body)


def test_a_loop_that_is_gone_cancels_its_requests(target: Target, head: DraftHead) -> None:
    llm = AsyncLLM(target, head, **SETTINGS)
    llm_thread = llm._engine

    async def leave_behind() -> None:
        await llm.submit("abc", ENDLESS, request_id="left behind")

    async def go_on() -> None:
        while llm._handles:
            await asyncio.sleep(0.01)
        again = await llm.submit("abc", GREEDY)
        assert len((await again.result()).outputs[0].token_ids) == 10
        await idle(llm.llm.engine)
        assert llm.llm.engine.blocks.num_free == 200
        await llm.close()

    asyncio.run(leave_behind())
    asyncio.run(asyncio.wait_for(go_on(), 300))
    assert not llm_thread.is_alive()


def test_the_event_loop_is_never_blocked(run: Callable) -> None:
    """A processor that waits for the event loop to move on: it would wait forever if the loop waited for the engine."""
    moved = threading.Event()

    def wait(ids, scores):
        assert moved.wait(300)
        return scores

    async def body(llm: AsyncLLM) -> None:
        handle = await llm.submit("abc", SamplingParams(temperature=0, max_tokens=2, logits_processors=[wait]))
        other = await llm.submit("abc", GREEDY)
        moved.set()
        await asyncio.gather(handle.result(), other.result())

    run(body)


@pytest.mark.parametrize("request_id", [5, [], b"a"])
def test_a_request_id_is_text(run: Callable, request_id: object) -> None:
    async def body(llm: AsyncLLM) -> None:
        with pytest.raises(JetSpecError, match=r"request_id=.*: must be text"):
            await llm.submit("abc", GREEDY, request_id=request_id)

    run(body)
