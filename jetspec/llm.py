"""`LLM`: generate, chat and stream, after vLLM's offline API."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any, Literal, cast

import torch

from jetspec.dispatcher import Dispatcher, Request, raise_failures
from jetspec.drafts import load_drafter
from jetspec.engine import Budget, Drafter, Engine, Observer
from jetspec.engine.requests import is_list
from jetspec.errors import JetSpecError
from jetspec.head import DraftHead
from jetspec.inputs import (
    ChatTemplateKwargs,
    Conversation,
    Prompt,
    as_conversations,
    as_prompts,
    checked_prompt,
    encode,
    params_for,
    render_chat,
)
from jetspec.models.loading import load_target, resolve_device, resolve_dtype
from jetspec.models.target import Target
from jetspec.outputs import RequestOutput, StreamOutput
from jetspec.prompts import PromptInput, is_conversation
from jetspec.sampling import SamplingParams

#: Called with the prompt's index, its new token ids and the text they complete.
OnToken = Callable[[int, list[int], str], None]


class LLM:
    """A target and what drafts for it.

    Args:
        model: hub id, directory, `.gguf` file, alias (`smollm2-135m`), or a loaded `Target`.
        draft: "auto" takes the head shipped for the target, else one published for it on the hub, else prompt lookup,
            and logs one line that says which. Or a draft head or small model: hub id, directory, alias of a shipped
            head, or a loaded `DraftHead`, `Target` or `Drafter`. None decodes plainly.
        draft_method: what is made of it: "tree" or "chain" (the most probable path only) of a draft head, "model"
            of a small language model with the target's vocabulary, "ngram" for prompt lookup, which takes no `draft`.
        head_window: committed tokens a draft head looks back on; None: all. Bounds the time of a draft in long texts.
        head_causal: whether the blocks of a draft head are causal (JetSpec) or bidirectional (DFlash), for a head whose
            configuration does not say.
        tree_budget: rows of a verify forward per sequence, root included; "auto" chooses them for speed, down to plain
            decoding.
        device: "auto" (CUDA where present, else CPU) or a torch device.
        dtype: "auto" (float32 on CPU, the checkpoint's own elsewhere) or "float32", "bfloat16", "float16".
        batch_invariant: give the same text to the last bit whatever the batch and the draft, in half precision too, at
            the price of padded forwards (see `Engine`).
        seed: where the noise of requests without a seed comes from.
        engine_args: passed to `Engine` (`num_blocks`, `kv_block_size`, `max_num_batched_tokens`, `max_num_seqs`, ...).

    Threads may share it: they take turns, round by round, and every round serves the requests of all. A logits
    processor or an observer must not call it. `AsyncLLM` serves an event loop.

    Raises:
        JetSpecError: target or head cannot be loaded, do not fit each other or the other arguments, or the target
            cannot be batch-invariant.

    Example:
        >>> llm = LLM("smollm2-135m", draft="smollm2-135m")
        >>> llm.chat([{"role": "user", "content": "What is 2 + 2?"}], SamplingParams(temperature=0, max_tokens=64))
    """

    def __init__(
        self,
        model: str | Path | Target,
        draft: str | Path | DraftHead | Target | Drafter | None = "auto",
        *,
        draft_method: str = "tree",
        head_window: int | None = None,
        head_causal: bool | None = None,
        tree_budget: int | Literal["auto"] | Budget = "auto",
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        batch_invariant: bool = False,
        seed: int = 0,
        observer: Observer | None = None,
        **engine_args: Any,
    ) -> None:
        target = _target(model, device, dtype)
        self.engine = Engine(
            target,
            load_drafter(draft, target, method=draft_method, head_window=head_window, head_causal=head_causal),
            tree_budget=tree_budget,
            batch_invariant=batch_invariant,
            seed=seed,
            observer=observer,
            **engine_args,
        )
        self.target = self.engine.target
        self.dispatcher = Dispatcher(self.engine)
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
        return self._finish(self.prepare(prompts, params), on_token)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_token: OnToken | None = None,
        chat_template_kwargs: ChatTemplateKwargs | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or a list of them, through the target's chat template.

        `chat_template_kwargs` are arguments of the template, as in {"enable_thinking": False}.

        Raises:
            JetSpecError: the target has no chat template, or it does not use one of the arguments; or as in `generate`.
        """
        return self._finish(self.prepare_chat(messages, params, chat_template_kwargs), on_token)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[StreamOutput]:
        """What `generate` does, as an iterator over the pieces of all answers, in the order they are committed.

        Leaving the iterator early (`break`, then `close()` or the iterator's end of life) cancels what still runs.
        Several streams may be read in turns: they share the rounds.

        Raises:
            JetSpecError: at once, if a prompt or its parameters are refused.
            RequestError: at the end, if a request failed.
        """
        return self._run(self.prepare(prompts, params))

    def stream_chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template_kwargs: ChatTemplateKwargs | None = None,
    ) -> Iterator[StreamOutput]:
        """`stream` for conversations, as `chat` takes them."""
        return self._run(self.prepare_chat(messages, params, chat_template_kwargs))

    def prepare(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Request]:
        """The requests that `generate` would run, encoded and checked. JetSpecError if one is refused."""
        batch = as_prompts(prompts)
        texts = [p if isinstance(p, str) else None for p in batch]
        ids = [self.encode(p) if isinstance(p, str) else p for p in batch]
        return self._requests(ids, texts, params)

    def prepare_chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        chat_template_kwargs: ChatTemplateKwargs | None = None,
    ) -> list[Request]:
        """The requests that `chat` would run, encoded and checked. JetSpecError if one is refused."""
        texts = [self.render_chat(c, chat_template_kwargs) for c in as_conversations(messages)]
        ids = [self.encode(t, add_special_tokens=False) for t in texts]
        return self._requests(ids, texts, params)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. JetSpecError if the target has no tokenizer or the text is no UTF-8."""
        return encode(self.target, text, add_special_tokens=add_special_tokens)

    def encode_prompts(
        self,
        prompts: Sequence[PromptInput],
        chat: bool | None = None,
        chat_template_kwargs: ChatTemplateKwargs | None = None,
    ) -> list[list[int]]:
        """Token ids of each prompt, whatever its form.

        Args:
            prompts: a list of texts, token ids and conversations, in any mixture.
            chat: put texts through the chat template, as conversations always are; None: where there is a template.
            chat_template_kwargs: arguments of the chat template, as {"enable_thinking": False}.

        Raises:
            JetSpecError: a prompt is something else, or cannot be rendered or encoded; the template does not use an
                argument, or no prompt goes through it.
        """
        if not is_list(prompts):
            raise JetSpecError(f"prompts: must be a list of texts, token ids and conversations, not {prompts!r:.80}")
        if chat is None:
            chat = getattr(self.target.tokenizer, "chat_template", None) is not None
        rendered = any(chat if isinstance(prompt, str) else is_conversation(prompt) for prompt in prompts)
        if chat_template_kwargs and not rendered:
            raise JetSpecError(
                "chat_template_kwargs: no prompt goes through a chat template; leave them out, or ask for the template"
            )
        return [self._encode_prompt(prompt, index, chat, chat_template_kwargs) for index, prompt in enumerate(prompts)]

    def _encode_prompt(
        self, prompt: PromptInput, index: int, chat: bool, kwargs: ChatTemplateKwargs | None
    ) -> list[int]:
        if isinstance(prompt, str):
            if not chat:
                return self.encode(prompt)
            prompt = [{"role": "user", "content": prompt}]
        if is_conversation(prompt):
            return self.encode(self.render_chat(prompt, kwargs), add_special_tokens=False)
        return cast(list[int], checked_prompt(prompt, f"prompt {index}"))

    def render_chat(self, messages: Conversation, chat_template_kwargs: ChatTemplateKwargs | None = None) -> str:
        """The prompt that the chat template makes of a conversation, ready for the assistant's turn.

        Raises:
            JetSpecError: there is no chat template, it refuses the messages, or it does not use an argument.
        """
        return render_chat(self.target, messages, chat_template_kwargs)

    def _requests(
        self,
        prompts: list[list[int]],
        texts: Sequence[str | None],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Request]:
        requests = [
            Request(str(next(self._ids)), text, ids, p, index)
            for index, (text, ids, p) in enumerate(zip(texts, prompts, params_for(len(prompts), params), strict=True))
        ]
        for request in requests:
            self._check(request)
        return requests

    def _check(self, request: Request) -> None:
        try:
            self.engine.check(request.prompt_token_ids, request.params)
        except JetSpecError as error:
            raise JetSpecError(f"prompt {request.index}: {error}") from None

    def _run(self, requests: list[Request]) -> Generator[StreamOutput, None, None]:
        """Run requests to their end; yields the pieces."""
        pieces: deque[StreamOutput] = deque()
        try:
            for request in requests:
                self.dispatcher.start(request, pieces.append)
            # The pieces alone say when all answers have ended: another thread's round may have ended an answer without
            # having handed its last piece over yet.
            unfinished = sum(request.params.n for request in requests)
            while unfinished:
                if not pieces:
                    self.dispatcher.step()
                while pieces:
                    piece = pieces.popleft()
                    unfinished -= piece.finish_reason is not None
                    yield piece
        finally:
            # An error, an interrupt or a reader who leaves must not leave requests behind that hold cache blocks.
            for request in requests:
                self.dispatcher.cancel(request)
        raise_failures(requests)

    def _finish(self, requests: list[Request], on_token: OnToken | None) -> list[RequestOutput]:
        if on_token is not None and not callable(on_token):
            raise JetSpecError(f"on_token={on_token!r:.80}: must be callable as (index, token_ids, text), or None")
        with closing(self._run(requests)) as pieces:
            for piece in pieces:
                if on_token is not None:
                    on_token(piece.prompt_index, piece.token_ids, piece.text)
        return [r.output() for r in requests]


def _target(model: str | Path | Target, device: str | torch.device, dtype: str | torch.dtype) -> Target:
    if not isinstance(model, str | Path | Target):
        raise JetSpecError(f"model={model!r:.80}: must be the name of a target, or a loaded Target")
    if not isinstance(model, Target):
        return load_target(str(model), device=str(device), dtype=dtype)
    # The device of a tensor has an index, which "cuda" lacks.
    if device != "auto" and torch.empty(0, device=resolve_device(str(device))).device != model.device:
        raise JetSpecError(f"device={str(device)!r}: the target is loaded on {model.device} already; leave device out")
    if dtype != "auto" and resolve_dtype(dtype, model.device) != model.dtype:
        raise JetSpecError(f"dtype={str(dtype)!r}: the target is loaded in {model.dtype} already; leave dtype out")
    return model
