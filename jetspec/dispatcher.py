"""Requests on an engine: the state of each, and a dispatcher that runs them and hands out the pieces."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from jetspec.engine import Engine, Sequence
from jetspec.errors import JetSpecError, RequestError
from jetspec.outputs import CompletionOutput, RequestOutput, StreamOutput
from jetspec.sampling import SamplingParams, child_seed


@dataclass
class Request:
    """One prompt and its parameters; `answers` holds the state of each of the `n` answers once it runs."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    index: int = 0
    answers: list[Sequence] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return bool(self.answers) and all(s.finished for s in self.answers)

    @property
    def errors(self) -> list[Exception]:
        """Why answers failed."""
        return [s.error for s in self.answers if s.error is not None]

    def output(self) -> RequestOutput:
        first = self.answers[0]
        completions = [
            CompletionOutput(
                index=index,
                text=s.text,
                token_ids=s.output_ids,
                finish_reason=s.finish_reason,
                stop_reason=s.stop_reason,
                logprobs=None if s.params.logprobs is None else s.logprobs,
            )
            for index, s in enumerate(self.answers)
        ]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=completions,
            metrics=first.metrics,
            completion_metrics=[s.metrics for s in self.answers],
            prompt_logprobs=None if self.params.prompt_logprobs is None else first.prompt_logprobs,
            finished=self.finished,
        )


def raise_failures(requests: list[Request]) -> None:
    """RequestError, with the outputs of all, if any of these requests that have ended has failed."""
    failed = [(r.index, error) for r in requests for error in r.errors]
    if failed:
        index, first = failed[0]
        others = f" ({len(failed)} requests failed)" if len(failed) > 1 else ""
        reason = first if isinstance(first, JetSpecError) else repr(first)
        raise RequestError(f"prompt {index}: {reason}{others}", [r.output() for r in requests]) from first


class Dispatcher:
    """Runs requests on one engine and hands every piece to whoever asked for it, whoever calls `step`.

    Threads take turns. Logits processors and observers, which run within a round, can only `cancel`.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._receivers: dict[str, tuple[Request, int, Callable[[StreamOutput], None]]] = {}
        self._cancelled: deque[Request] = deque()
        self._lock = threading.Lock()
        self._holder: int | None = None

    @property
    def _is_mine(self) -> bool:
        return self._holder == threading.get_ident()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """While the context is open the engine is this thread's; then what was cancelled ends."""
        if self._is_mine:
            raise JetSpecError("an LLM cannot be called from its own logits processors and observers")
        with self._lock:
            self._holder = threading.get_ident()
            try:
                yield
            finally:
                while self._cancelled:
                    self._end(self._cancelled.popleft())
                self._holder = None

    def start(self, request: Request, receive: Callable[[StreamOutput], None]) -> None:
        """Queue a request; `receive` is called with each piece of its answers.

        Raises:
            JetSpecError: the engine refuses the request, or its id is in use; nothing of it runs then.
        """
        added: list[Sequence] = []
        with self._turn():
            try:
                for index, params in enumerate(_answers(request.params)):
                    engine_id = request.request_id if index == 0 else f"{request.request_id}/{index}"
                    added.append(self.engine.add(engine_id, request.prompt_token_ids, params))
            except BaseException:
                for sequence in added:
                    self.engine.cancel(sequence.request_id)
                raise
            request.answers = added
            self._receivers |= {s.request_id: (request, index, receive) for index, s in enumerate(added)}

    def step(self) -> None:
        """Run one round of the engine."""
        with self._turn():
            for out in self.engine.step():
                self._hand_over(out.sequence, out.new_token_ids, out.new_text)

    def cancel(self, request: Request) -> None:
        """End what still runs of a request, with a last piece whose finish reason is "abort".

        Within a round, as where the garbage collector closes a stream, it ends after the round.
        """
        self._cancelled.append(request)
        if not self._is_mine:
            with self._turn():
                pass

    def _end(self, request: Request) -> None:
        for sequence in request.answers:
            receiver = self._receivers.get(sequence.request_id)
            if receiver is not None and receiver[0] is request:
                self.engine.cancel(sequence.request_id)
                self._hand_over(sequence, [], sequence.take_text())

    def _hand_over(self, sequence: Sequence, token_ids: list[int], text: str) -> None:
        if sequence.request_id not in self._receivers:
            return  # added to the engine by other hands
        request, index, receive = self._receivers[sequence.request_id]
        if sequence.finished:
            del self._receivers[sequence.request_id]
        stop = sequence.num_output
        receive(
            StreamOutput(
                request_id=request.request_id,
                prompt_index=request.index,
                answer_index=index,
                text=text,
                token_ids=token_ids,
                finish_reason=sequence.finish_reason,
                stop_reason=sequence.stop_reason,
                logprobs=None if sequence.params.logprobs is None else sequence.logprobs[stop - len(token_ids) : stop],
            )
        )


def _answers(params: SamplingParams) -> list[SamplingParams]:
    """One set of parameters for each of `n` answers; the first answer is that of `n=1`."""
    if params.seed is None:
        return [replace(params, n=1)] * params.n
    return [replace(params, n=1, seed=child_seed(params.seed, i)) for i in range(params.n)]
