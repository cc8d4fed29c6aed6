"""Requests on an engine: the state of each, and a dispatcher that runs them and hands out the pieces."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from jetspec.engine import Engine, Sequence
from jetspec.errors import JetSpecError, RequestError
from jetspec.outputs import CompletionOutput, RequestOutput, StreamOutput, with_decoded_tokens
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
        """Whether all answers have ended. Their last pieces may not have been handed over yet."""
        return bool(self.answers) and all(s.finished for s in self.answers)

    @property
    def errors(self) -> list[Exception]:
        """Why answers failed."""
        return [s.error for s in self.answers if s.error is not None]

    def output(self) -> RequestOutput:
        """All answers as they are now."""
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


@dataclass
class _Receiver:
    """Who gets the pieces of one answer, and how much of it has been handed over."""

    request: Request
    index: int
    sequence: Sequence
    receive: Callable[[StreamOutput], None]
    num_tokens: int = 0
    num_characters: int = 0


class Dispatcher:
    """Runs requests on one engine and hands every piece to its receiver, whichever thread calls `step`.

    Threads take turns. Logits processors and observers, which run within a turn, can only `cancel`.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._receivers: dict[str, _Receiver] = {}
        self._cancelled: deque[Request] = deque()
        # Reentrant, because the garbage collector may close a stream, and so call `cancel`, at any instruction of the
        # thread that holds the lock.
        self._lock = threading.RLock()
        #: Whether the thread that holds the lock is within a turn. Only that thread reads or writes it.
        self._in_turn = False

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Give this thread the engine while the context is open; then end what was cancelled in the meantime."""
        with self._lock:
            if self._in_turn:
                raise JetSpecError("an LLM cannot be called from its own logits processors and observers")
            self._in_turn = True
            try:
                yield
            finally:
                self._finish_turn()
        self._take_up_cancelled()

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
            self._receivers |= {s.request_id: _Receiver(request, i, s, receive) for i, s in enumerate(added)}

    def step(self) -> None:
        """Run one round of the engine."""
        with self._turn():
            try:
                for out in self.engine.step():
                    receiver = self._receivers.get(out.sequence.request_id)
                    if receiver is not None:  # else it was added to the engine directly
                        self._hand_over(receiver)
            finally:
                # What ended without an output: in a round that failed, or cancelled on the engine directly.
                for receiver in [r for r in self._receivers.values() if r.sequence.finished]:
                    self._end(receiver)

    def cancel(self, request: Request) -> None:
        """End what still runs of a request, with a last piece whose finish reason is "abort".

        It ends at once or, where a round is running, after that round. This method never waits, so it may be called
        from anywhere.
        """
        self._cancelled.append(request)
        self._take_up_cancelled()

    def _take_up_cancelled(self) -> None:
        """End cancelled requests unless a turn is going on, whose thread does so once the turn is over."""
        # The loop, since a request may be queued while another thread is about to release the lock.
        while self._cancelled and self._lock.acquire(blocking=False):
            try:
                if self._in_turn:
                    return
                self._in_turn = True
                self._finish_turn()
            finally:
                self._lock.release()

    def _finish_turn(self) -> None:
        """End what was cancelled since the turn began, and the turn itself."""
        try:
            while self._cancelled:
                request = self._cancelled.popleft()
                for receiver in [r for r in self._receivers.values() if r.request is request]:
                    self._end(receiver)
        finally:
            self._in_turn = False

    def _end(self, receiver: _Receiver) -> None:
        self.engine.cancel(receiver.sequence.request_id)
        self._hand_over(receiver)

    def _hand_over(self, receiver: _Receiver) -> None:
        """Give the receiver what its answer has gained since the last piece."""
        sequence, start, stop = receiver.sequence, receiver.num_tokens, receiver.sequence.num_output
        text = sequence.text[receiver.num_characters :]
        receiver.num_tokens, receiver.num_characters = stop, len(sequence.text)
        self._decode_logprobs(sequence, start, stop)
        if sequence.finished:
            del self._receivers[sequence.request_id]
        receiver.receive(
            StreamOutput(
                request_id=receiver.request.request_id,
                prompt_index=receiver.request.index,
                answer_index=receiver.index,
                text=text,
                token_ids=sequence.output_ids[start:stop],
                finish_reason=sequence.finish_reason,
                stop_reason=sequence.stop_reason,
                logprobs=None if sequence.params.logprobs is None else sequence.logprobs[start:stop],
            )
        )

    def _decode_logprobs(self, sequence: Sequence, start: int, stop: int) -> None:
        """Add their text to the log probabilities of output tokens, and at the end to those of the prompt."""
        tokenizer, ids, first = self.engine.target.tokenizer, sequence.token_ids, len(sequence.prompt_ids)
        if sequence.params.logprobs is not None:
            new = sequence.logprobs[start:stop]
            sequence.logprobs[start:stop] = with_decoded_tokens(tokenizer, ids, first + start, new)
        if sequence.params.prompt_logprobs is not None and sequence.finished:
            known = [entry for entry in sequence.prompt_logprobs[1:] if entry is not None]
            sequence.prompt_logprobs[1:] = with_decoded_tokens(tokenizer, ids, 1, known)


def _answers(params: SamplingParams) -> list[SamplingParams]:
    """One set of parameters for each of `n` answers; the first answer is that of `n=1`."""
    if params.seed is None:
        return [params.replace(n=1)] * params.n
    return [params.replace(n=1, seed=child_seed(params.seed, i)) for i in range(params.n)]
