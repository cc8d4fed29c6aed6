"""`LLM`: the front door. Follows vLLM's offline API."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from jetspec.engine import Engine, Observer, RequestMetrics
from jetspec.engine import Sequence as EngineSequence
from jetspec.errors import JetSpecError, RequestError
from jetspec.head import DraftHead, load_head
from jetspec.sampling import Logprob, SamplingParams, child_seed
from jetspec.target import Target, load_target

Prompt = str | list[int]
Message = Mapping[str, Any]
#: Called with the prompt's index, its new token ids and the text they complete.
OnToken = Callable[[int, list[int], str], None]


@dataclass
class CompletionOutput:
    """One answer.

    `finish_reason` is "stop", "length", "abort" or "error"; `stop_reason` the stop token or string that ended it.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    #: Per token its log probability and those of the most probable ones, where `SamplingParams.logprobs` asks for them.
    logprobs: list[dict[int, Logprob]] | None = None


@dataclass
class RequestOutput:
    """The answers to one prompt, and what they cost."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    #: What the first answer cost; `completion_metrics` has those of all.
    metrics: RequestMetrics
    completion_metrics: list[RequestMetrics]
    #: Per prompt token, None for the first, where `SamplingParams.prompt_logprobs` asks for them.
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = True


class LLM:
    """A target with an optional draft head.

    Args:
        model: hub id, directory, `.gguf` file, alias (`smollm2-135m`), or a loaded `Target`.
        draft: draft head: hub id, directory, alias of a shipped head, or a loaded `DraftHead`; None decodes plainly.
        tree_budget: rows of a verify forward per sequence, root included.
        device: "auto" (CUDA where present, else CPU) or a torch device.
        dtype: "auto" (float32 on CPU, the checkpoint's own elsewhere) or "float32", "bfloat16", "float16".
        seed: where the noise of requests without a seed comes from.
        engine_args: passed to `Engine` (`num_blocks`, `block_size`, `max_rows`, `max_running`, `observer`, ...).

    Raises:
        JetSpecError: target or head cannot be loaded, or do not fit each other.

    Example:
        >>> llm = LLM("smollm2-135m", draft="smollm2-135m")
        >>> llm.chat([{"role": "user", "content": "What is 2 + 2?"}], SamplingParams(temperature=0, max_tokens=64))
    """

    def __init__(
        self,
        model: str | Path | Target,
        draft: str | Path | DraftHead | None = None,
        *,
        tree_budget: int = 16,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        seed: int = 0,
        observer: Observer | None = None,
        **engine_args: Any,
    ) -> None:
        self.target = model if isinstance(model, Target) else load_target(str(model), device=str(device), dtype=dtype)
        if draft is None or isinstance(draft, DraftHead):
            self.head = draft
        else:
            self.head = load_head(draft, device=self.target.device, dtype=self.target.dtype)
        self.engine = Engine(
            self.target, self.head, tree_budget=tree_budget, seed=seed, observer=observer, **engine_args
        )
        self._ids = count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_token: OnToken | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt (a string, or its token ids); all run together.

        Args:
            prompts: one prompt or a list of them.
            params: one for all prompts, or one for each.
            on_token: called as tokens arrive.

        Returns:
            One output a prompt, in order.

        Raises:
            JetSpecError: a prompt or its parameters are refused; nothing has run then.
            RequestError: a request failed on the way, in a logits processor say. All others have finished: the error's
                `outputs` holds every answer.
        """
        batch = _as_list(prompts)
        texts = [p if isinstance(p, str) else None for p in batch]
        ids = [self.encode(p) if isinstance(p, str) else _token_ids(p, index) for index, p in enumerate(batch)]
        return self._run(ids, texts, _params_for(len(batch), params), on_token)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_token: OnToken | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or a list of them, through the target's chat template.

        Raises:
            JetSpecError: the target has no chat template, or as in `generate`.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        texts = [self.render_chat(c) for c in conversations]  # type: ignore[arg-type]
        ids = [self.encode(t, add_special_tokens=False) for t in texts]
        return self._run(ids, texts, _params_for(len(texts), params), on_token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        tokenizer = self._tokenizer()
        try:
            return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
        except TypeError:  # what the tokenizer makes of a lone surrogate
            raise JetSpecError(f"text cannot be encoded as UTF-8: {text!r:.80}") from None

    def render_chat(self, messages: Sequence[Message]) -> str:
        """The prompt that the chat template makes of a conversation, ready for the assistant's turn."""
        if not messages:
            raise JetSpecError("messages is an empty conversation: give at least one message")
        tokenizer = self._tokenizer()
        if tokenizer.chat_template is None:
            raise JetSpecError(f"target {self.target.name!r} has no chat template: use generate with a plain prompt")
        return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)

    def _tokenizer(self) -> Any:
        if self.target.tokenizer is None:
            raise JetSpecError(f"target {self.target.name!r} has no tokenizer: give prompts as token ids")
        return self.target.tokenizer

    def _run(
        self,
        prompts: list[list[int]],
        texts: Sequence[str | None],
        params: list[SamplingParams],
        on_token: OnToken | None,
    ) -> list[RequestOutput]:
        for index, (ids, p) in enumerate(zip(prompts, params, strict=True)):
            try:
                self.engine.check(ids, p)
            except JetSpecError as error:
                raise JetSpecError(f"prompt {index}: {error}") from None
        requests: dict[str, int] = {}
        running: list[list[EngineSequence]] = []
        try:
            for index, (ids, p) in enumerate(zip(prompts, params, strict=True)):
                running.append([])
                for answer in _answers(p):
                    request_id = str(next(self._ids))
                    requests[request_id] = index
                    running[-1].append(self.engine.add(request_id, ids, answer))
            while any(not s.finished for answers in running for s in answers):
                for out in self.engine.step():
                    if on_token is not None and out.sequence.request_id in requests:
                        on_token(requests[out.sequence.request_id], out.new_token_ids, out.new_text)
        finally:
            # An error or an interrupt must not leave requests behind that hold cache blocks.
            for sequence in (s for answers in running for s in answers if not s.finished):
                self.engine.cancel(sequence.request_id)
        outputs = [_output(answers, text) for answers, text in zip(running, texts, strict=True)]
        failed = [(index, s) for index, answers in enumerate(running) for s in answers if s.error is not None]
        if failed:
            index, first = failed[0]
            others = f" ({len(failed)} requests failed)" if len(failed) > 1 else ""
            raise RequestError(f"prompt {index}: {first.error}{others}", outputs) from first.error
        return outputs


def _answers(params: SamplingParams) -> list[SamplingParams]:
    """One set of parameters for each of `n` answers; the first answer is that of `n=1`."""
    if params.seed is None:
        return [replace(params, n=1)] * params.n
    return [replace(params, n=1, seed=child_seed(params.seed, i)) for i in range(params.n)]


def _output(answers: list[EngineSequence], prompt: str | None) -> RequestOutput:
    first = answers[0]
    completions = [
        CompletionOutput(
            index=index,
            text=s.text,
            token_ids=s.output_ids,
            finish_reason=s.finish_reason,
            stop_reason=s.stop_reason,
            logprobs=None if s.params.logprobs is None else s.logprobs,
        )
        for index, s in enumerate(answers)
    ]
    return RequestOutput(
        request_id=first.request_id,
        prompt=prompt,
        prompt_token_ids=first.prompt_ids,
        outputs=completions,
        metrics=first.metrics,
        completion_metrics=[s.metrics for s in answers],
        prompt_logprobs=None if first.params.prompt_logprobs is None else first.prompt_logprobs,
    )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items: list[Any] = list(prompts)
    # A number, or an array's or a tensor's element: the ids of one prompt.
    if items and (isinstance(items[0], int) or getattr(items[0], "ndim", None) == 0):
        return [items]
    return items


def _token_ids(prompt: Sequence[int], index: int) -> list[int]:
    """A prompt's ids as plain integers, whether they came in a list, an array or a tensor."""
    try:
        return [operator.index(token) for token in prompt]
    except TypeError:
        raise JetSpecError(f"prompt {index}: must be a text or a list of token ids, not {prompt!r:.80}") from None


def _params_for(n: int, params: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * n
    if isinstance(params, SamplingParams):
        return [params] * n
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise JetSpecError(f"params: must be SamplingParams or a list of them, not {params!r:.80}")
    if len(params) != n:
        raise JetSpecError(f"params: {len(params)} given for {n} prompts; give one for all, or one for each")
    return list(params)
