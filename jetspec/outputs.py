"""What a request gives back: whole outputs, and the pieces of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jetspec.detokenize import token_texts
from jetspec.metrics import RequestMetrics
from jetspec.sampling import Logprob


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


@dataclass(frozen=True)
class StreamOutput:
    """What one round added to one answer. The texts of all pieces joined are the answer's text, likewise the ids.

    A piece of text never ends inside a character or a stop string that may be beginning, so it may be empty.
    """

    request_id: str
    #: Place of the prompt in the call, and of the answer among the prompt's `n`.
    prompt_index: int
    answer_index: int
    text: str
    token_ids: list[int]
    #: As in `CompletionOutput`; None while more is to come.
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None


def with_decoded_tokens(
    tokenizer: Any, token_ids: Sequence[int], start: int, entries: Sequence[dict[int, Logprob]]
) -> list[dict[int, Logprob]]:
    """The entries with the text of every token, as it reads after the tokens before it.

    Args:
        tokenizer: a transformers tokenizer; None leaves the entries without text.
        token_ids: prompt and answer.
        start: place in `token_ids` that the first entry is about; the others are about those that follow.
        entries: what `top_logprobs` gave for each place.
    """
    if tokenizer is None:
        return list(entries)
    texts = token_texts(tokenizer)
    decoded: list[dict[int, Logprob]] = []
    for place, entry in enumerate(entries, start):
        before = token_ids[max(0, place - texts.CONTEXT) : place]
        decoded.append({t: replace(known, decoded_token=texts.text(before, t)) for t, known in entry.items()})
    return decoded
