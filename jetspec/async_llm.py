"""`AsyncLLM`: requests from an event loop, submitted, streamed and cancelled while others run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any
from uuid import uuid4

from jetspec.dispatcher import Request, raise_failures
from jetspec.engine import Drafter
from jetspec.errors import EngineError, JetSpecError
from jetspec.head import DraftHead
from jetspec.inputs import ChatTemplateKwargs, Conversation, Prompt, checked_prompt
from jetspec.llm import LLM
from jetspec.models.target import Target
from jetspec.outputs import RequestOutput, StreamOutput
from jetspec.sampling import SamplingParams


class RequestHandle:
    """A submitted request: iterate over it for its pieces, await `result()` for the whole, or `cancel()` it.

    Whoever leaves the iteration early, or is cancelled while waiting for a piece or the result, cancels the request.
    Pieces that nobody reads wait; they do not hold up the engine.
    """

    def __init__(self, llm: AsyncLLM, request: Request) -> None:
        self.request = request
        self.loop = asyncio.get_running_loop()
        self._llm = llm
        self._unfinished = request.params.n
        self._error: Exception | None = None
        self._pieces: asyncio.Queue[StreamOutput | None] = asyncio.Queue()
        self._ended = asyncio.Event()

    @property
    def request_id(self) -> str:
        """The id of the request, as given to `submit` or made there."""
        return self.request.request_id

    async def __aiter__(self) -> AsyncIterator[StreamOutput]:
        """The pieces of all answers, as they are committed.

        Raises:
            RequestError: at the end, if the request failed.
            EngineError: the engine stopped.
        """
        try:
            while (piece := await self._pieces.get()) is not None:
                yield piece
        finally:
            self.cancel()
        self._pieces.put_nowait(None)  # for whoever iterates again
        self._raise()

    async def result(self) -> RequestOutput:
        """The request's output once it has ended, be it by `cancel`.

        Raises:
            RequestError: the request failed.
            EngineError: the engine stopped.
        """
        await self.wait()
        self._raise()
        return self.request.output()

    async def wait(self) -> None:
        """Wait until the request has ended, in whichever way."""
        try:
            await self._ended.wait()
        finally:
            self.cancel()

    def cancel(self) -> None:
        """End the request soon, with finish reason "abort"; nothing happens if it has ended."""
        if not self._ended.is_set():
            self._llm._cancel(self)

    # What follows is called in the event loop, for the engine.

    def _receive(self, piece: StreamOutput) -> None:
        if self._ended.is_set():
            return
        self._pieces.put_nowait(piece)
        self._unfinished -= piece.finish_reason is not None
        if not self._unfinished:
            self._end()

    def _end(self, error: Exception | None = None) -> None:
        if not self._ended.is_set():
            self._error = error
            self._pieces.put_nowait(None)
            self._ended.set()
            self._llm._forget(self)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
        raise_failures([self.request])


class AsyncLLM:
    """An `LLM` whose engine runs in a thread of its own, for any number of requests at a time from one event loop.

    The event loop never waits for a forward, and the engine never for a reader.

    Args:
        model, draft, settings: as for `LLM`.

    Example:
        >>> async with AsyncLLM("smollm2-135m", draft="smollm2-135m") as llm:
        ...     async for piece in llm.generate("The capital of France is", SamplingParams(temperature=0)):
        ...         print(piece.text, end="", flush=True)
    """

    def __init__(
        self,
        model: str | Path | Target,
        draft: str | Path | DraftHead | Target | Drafter | None = "auto",
        **settings: Any,
    ) -> None:
        self.llm = LLM(model, draft, **settings)
        self._handles: dict[str, RequestHandle] = {}
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        #: Held while a command is queued and while `_stopped` is set, so that none is queued that nobody would run.
        self._lock = threading.Lock()
        self._stopped: EngineError | None = None
        # One thread: requests start in the order they came, and a tokenizer is not for several threads at a time.
        self._preparer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="jetspec-prepare")
        self._engine = threading.Thread(target=self._serve, name="jetspec-engine", daemon=True)
        self._engine.start()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> RequestHandle:
        """Queue a prompt (a string, or its token ids).

        Raises:
            JetSpecError: the prompt or its parameters are refused, or `request_id` is in use.
            EngineError: closed, or the engine stopped on an error.
        """
        return await self._submit(partial(self.llm.prepare, [checked_prompt(prompt, "prompt")], params), request_id)

    async def submit_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        chat_template_kwargs: ChatTemplateKwargs | None = None,
    ) -> RequestHandle:
        """`submit` for a conversation, through the target's chat template and with arguments for it."""
        prepare = partial(self.llm.prepare_chat, [messages], params, chat_template_kwargs)
        return await self._submit(prepare, request_id)

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> AsyncIterator[StreamOutput]:
        """Submit a prompt and yield the pieces of its answers; leaving early cancels it. Errors as in `submit`."""
        return self._stream(partial(self.submit, prompt, params, request_id=request_id))

    def chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        chat_template_kwargs: ChatTemplateKwargs | None = None,
    ) -> AsyncIterator[StreamOutput]:
        """`generate` for a conversation, through the target's chat template and with arguments for it."""
        submit = partial(self.submit_chat, request_id=request_id, chat_template_kwargs=chat_template_kwargs)
        return self._stream(partial(submit, messages, params))

    async def _stream(self, submit: Callable[[], Awaitable[RequestHandle]]) -> AsyncIterator[StreamOutput]:
        handle = await submit()
        try:
            async for piece in handle:
                yield piece
        finally:
            handle.cancel()

    async def cancel(self, request_id: str) -> bool:
        """End a request and wait until it has; returns whether it was running."""
        handle = self._handles.get(request_id)
        if handle is None:
            return False
        handle.cancel()
        await handle.wait()
        return True

    async def close(self) -> None:
        """Abort what still runs and end the engine's thread. Later submits raise EngineError."""
        self._stop(EngineError("AsyncLLM is closed: open a new one"))
        self._preparer.shutdown(wait=False)
        await asyncio.get_running_loop().run_in_executor(None, self._engine.join)

    async def _submit(self, prepare: Callable[[], list[Request]], request_id: str | None) -> RequestHandle:
        self._check_running()
        if not isinstance(request_id, str | None):
            raise JetSpecError(f"request_id={request_id!r:.80}: must be text, or None for an id of its own")
        [request] = await asyncio.get_running_loop().run_in_executor(self._preparer, prepare)
        request.request_id = uuid4().hex if request_id is None else request_id
        if request.request_id in self._handles:
            raise JetSpecError(f"request_id={request_id!r} is already running: give each request its own id")
        handle = RequestHandle(self, request)
        with self._lock:
            self._check_running()
            self._handles[request.request_id] = handle
            self._commands.put(partial(self._start, handle))
        return handle

    def _check_running(self) -> None:
        if self._stopped is not None:
            raise _copy(self._stopped)

    def _cancel(self, handle: RequestHandle) -> None:
        with self._lock:
            if self._stopped is None:
                self._commands.put(partial(self.llm.dispatcher.cancel, handle.request))

    def _forget(self, handle: RequestHandle) -> None:
        self._handles.pop(handle.request_id, None)

    def _stop(self, error: EngineError) -> None:
        with self._lock:
            self._stopped = self._stopped or error
            self._commands.put(lambda: None)  # wakes the engine's thread

    # What follows runs in the engine's thread.

    def _serve(self) -> None:
        dispatcher = self.llm.dispatcher
        try:
            while self._stopped is None:
                self._obey()
                dispatcher.step()
            while not self._commands.empty():
                self._commands.get()()
            for handle in list(self._handles.values()):
                dispatcher.cancel(handle.request)
        except BaseException as error:  # whatever ended the thread, those who wait are told
            stopped = EngineError(f"the engine stopped on an error: {error!r}; open a new AsyncLLM")
            stopped.__cause__ = error
            self._stop(stopped)
            for handle in list(self._handles.values()):
                self._post(handle, handle._end, _copy(stopped))
                with suppress(Exception):  # to free its blocks, where the engine still can
                    dispatcher.cancel(handle.request)

    def _obey(self) -> None:
        """Carry out what is queued; with nothing to run, wait for more."""
        while self._stopped is None and not (self._commands.empty() and self.llm.engine.has_work):
            self._commands.get()()

    def _start(self, handle: RequestHandle) -> None:
        try:
            self.llm.dispatcher.start(handle.request, partial(self._post, handle, handle._receive))
        except Exception as error:
            self._post(handle, handle._end, error)

    def _post(self, handle: RequestHandle, call: Callable[..., None], *arguments: Any) -> None:
        """Call into the request's event loop; if that is closed, nobody waits for the request any more."""
        try:
            handle.loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            self._handles.pop(handle.request_id, None)
            self._commands.put(partial(self.llm.dispatcher.cancel, handle.request))


def _copy(error: EngineError) -> EngineError:
    """One for each who is told, as raising an error changes it."""
    copy = EngineError(str(error))
    copy.__cause__ = error.__cause__
    return copy
