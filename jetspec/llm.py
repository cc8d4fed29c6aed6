"""`LLM`: the front door. Follows vLLM's offline API."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch
from jinja2 import TemplateError

from jetspec.dispatcher import Dispatcher, Request, raise_failures
from jetspec.engine import Budget, Drafter, Engine, Observer, load_drafter
from jetspec.errors import JetSpecError
from jetspec.head import DraftHead
from jetspec.models.loading import load_target, resolve_dtype
from jetspec.models.target import Target, encode_text
from jetspec.outputs import RequestOutput, StreamOutput
from jetspec.prompts import PromptInput, is_conversation
from jetspec.sampling import SamplingParams

Prompt = str | list[int]
Message = Mapping[str, Any]
Conversation = Sequence[Message]
#: Of a chat template, by name.
ChatTemplateKwargs = Mapping[str, Any]
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

        `chat_template_kwargs` are switches of the template, as in {"enable_thinking": False}.

        Raises:
            JetSpecError: the target has no chat template, or as in `generate`.
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
        batch = [checked_prompt(p, f"prompt {index}") for index, p in enumerate(_as_list(prompts))]
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
        texts = [self.render_chat(c, chat_template_kwargs) for c in _conversations(messages)]
        ids = [self.encode(t, add_special_tokens=False) for t in texts]
        return self._requests(ids, texts, params)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return encode_text(self._tokenizer(), text, add_special_tokens=add_special_tokens)

    def encode_prompts(
        self,
        prompts: Sequence[PromptInput],
        chat: bool | None = None,
        chat_template_kwargs: ChatTemplateKwargs | None = None,
    ) -> list[list[int]]:
        """Token ids of each prompt, whatever its form. Texts go through the chat template where asked for or, with
        `chat=None`, where there is one; conversations always do.
        """
        if chat is None:
            chat = getattr(self.target.tokenizer, "chat_template", None) is not None
        return [self._encode_prompt(prompt, chat, chat_template_kwargs) for prompt in prompts]

    def _encode_prompt(self, prompt: Any, chat: bool, switches: ChatTemplateKwargs | None) -> list[int]:
        if isinstance(prompt, str):
            if not chat:
                return self.encode(prompt)
            prompt = [{"role": "user", "content": prompt}]
        if not is_conversation(prompt):
            return prompt
        return self.encode(self.render_chat(prompt, switches), add_special_tokens=False)

    def render_chat(self, messages: Sequence[Message], chat_template_kwargs: ChatTemplateKwargs | None = None) -> str:
        """The prompt that the chat template makes of a conversation, ready for the assistant's turn."""
        if not messages:
            raise JetSpecError("messages is an empty conversation: give at least one message")
        if not _is_list(messages) or not all(isinstance(m, Mapping) and "role" in m for m in messages):
            raise JetSpecError(
                f"messages: a conversation is a list of messages, as [{{'role': 'user', 'content': 'Hi'}}], "
                f"not {messages!r:.80}"
            )
        tokenizer = self._tokenizer()
        if tokenizer.chat_template is None:
            raise JetSpecError(f"target {self.target.name!r} has no chat template: use generate with a plain prompt")
        try:
            return tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **(chat_template_kwargs or {})
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise JetSpecError(f"messages: the target's chat template refuses them: {error}") from error

    def _tokenizer(self) -> Any:
        if self.target.tokenizer is None:
            raise JetSpecError(f"target {self.target.name!r} has no tokenizer: give prompts as token ids")
        return self.target.tokenizer

    def _requests(
        self,
        prompts: list[list[int]],
        texts: Sequence[str | None],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Request]:
        requests = [
            Request(str(next(self._ids)), text, ids, p, index)
            for index, (text, ids, p) in enumerate(zip(texts, prompts, _params_for(len(prompts), params), strict=True))
        ]
        for request in requests:
            try:
                self.engine.check(request.prompt_token_ids, request.params)
            except JetSpecError as error:
                raise JetSpecError(f"prompt {request.index}: {error}") from None
        return requests

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
    if device != "auto" and torch.device(device) != model.device:
        raise JetSpecError(f"device={str(device)!r}: the target is loaded on {model.device} already; leave device out")
    if dtype != "auto" and resolve_dtype(dtype, model.device) != model.dtype:
        raise JetSpecError(f"dtype={str(dtype)!r}: the target is loaded in {model.dtype} already; leave dtype out")
    return model


def _is_list(value: object) -> bool:
    """Whether a value holds items in order: a list, a tuple, an array or a tensor, say, but no text."""
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, str | bytes | Mapping)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    if isinstance(prompts, str):
        return [prompts]
    if not _is_list(prompts):
        raise JetSpecError(f"prompts: must be a text, token ids, or a list of such prompts, not {prompts!r:.80}")
    items: list[Any] = list(prompts)
    # A number, or an array's or a tensor's element: the ids of one prompt.
    if items and (isinstance(items[0], int) or getattr(items[0], "ndim", None) == 0):
        return [items]
    return items


def checked_prompt(prompt: Any, name: str) -> Prompt:
    """A text as it is; ids as plain integers, whether they came in a list, an array or a tensor.

    Raises JetSpecError, with the prompt's `name`, where it is neither.
    """
    if isinstance(prompt, str):
        return prompt
    try:
        if not _is_list(prompt) or any(isinstance(token, bool) for token in prompt):
            raise TypeError
        return [operator.index(token) for token in prompt]
    except TypeError:
        raise JetSpecError(f"{name}: must be a text or a list of token ids, not {prompt!r:.80}") from None


def _conversations(messages: Any) -> Sequence[Any]:
    if not _is_list(messages):
        raise JetSpecError(
            f"messages: must be a list of messages, as [{{'role': 'user', 'content': 'Hi'}}], or a list of such lists, "
            f"not {messages!r:.80}"
        )
    return [messages] if len(messages) and isinstance(messages[0], Mapping) else messages


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
