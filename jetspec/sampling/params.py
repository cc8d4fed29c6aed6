"""What a request asks of its tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from torch import Tensor

from jetspec.errors import JetSpecError
from jetspec.sampling.structured import StructuredOutputsParams

#: transformers' interface: (input_ids [1, t], scores [1, V]) -> scores [1, V].
LogitsProcessor = Callable[[Tensor, Tensor], Tensor]

#: Temperatures below this are greedy: dividing by them would leave nothing but the argmax.
GREEDY_BELOW = 1e-5


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop. Names and meanings follow vLLM.

    Args:
        n: answers a prompt; the first one equals that of `n=1`.
        temperature: 0 is greedy.
        top_p: keep the most probable tokens that together reach this probability.
        top_k: keep this many most probable tokens, and any as probable as the last of them; 0 or -1 keeps all.
        min_p: drop tokens less probable than this share of the most probable one.
        repetition_penalty: divides the positive logits of tokens in prompt or answer and multiplies the negative ones.
        frequency_penalty: taken off a token's logit for every time the answer holds it.
        presence_penalty: taken off a token's logit if the answer holds it.
        seed: makes the answer reproducible; None takes noise nobody else uses.
        stop: strings that end the answer.
        stop_token_ids: tokens that end the answer.
        bad_words: strings that the answer must not hold.
        ignore_eos: run on past the target's end-of-text tokens.
        max_tokens: tokens to generate at most; None allows what the context holds.
        min_tokens: no end-of-text, stop token or stop string before this many tokens.
        logprobs: report log probabilities of the chosen token and of this many most probable ones; -1: all tokens.
        prompt_logprobs: the same for the prompt's tokens.
        logit_bias: added to the logits of these tokens.
        logits_processors: called in order with (ids so far [1, t], scores [1, V]), as transformers does.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop string that ended the answer in its text.
        structured_outputs: the form the answer must have. The answer ends, with `finish_reason` "stop", where nothing
            can follow, also with `ignore_eos`; one that must end before `min_tokens` fails.

    Raises:
        JetSpecError: a value is out of range; the message names the field and the fix.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    logits_processors: Sequence[LogitsProcessor] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_lists()
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise JetSpecError(
                f"structured_outputs={self.structured_outputs!r:.80}: must be StructuredOutputsParams, or None for none"
            )
        if self.greedy and self.n > 1:
            raise JetSpecError(f"n={self.n}: greedy answers are all the same; use n=1, or a temperature above 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise JetSpecError(
                f"min_tokens={self.min_tokens}: must not exceed max_tokens={self.max_tokens}; raise max_tokens"
            )

    def _check_numbers(self) -> None:
        self._integer("n", low=1)
        self._number("temperature", low=0, fix="use 0 for greedy decoding")
        self._number("top_p", low=0, high=1, fix="use 1 to keep all tokens")
        if self.top_p == 0:
            raise JetSpecError("top_p=0: must be above 0; use temperature=0 to always take the most probable token")
        self._integer("top_k", low=-1, fix="use 0 or -1 to keep all tokens")
        self._number("min_p", low=0, high=1, fix="use 0 to keep all tokens")
        self._number("repetition_penalty", low=0, fix="use 1 for none")
        if self.repetition_penalty == 0:
            raise JetSpecError("repetition_penalty=0: must be above 0; use 1 for none")
        self._number("frequency_penalty", low=-2, high=2, fix="use 0 for none")
        self._number("presence_penalty", low=-2, high=2, fix="use 0 for none")
        self._integer("seed", low=-(2**63), high=2**64 - 1, fix="use None for no seed", optional=True)
        self._integer("max_tokens", low=1, fix="use None for as many as the context holds", optional=True)
        self._integer("min_tokens", low=0)
        for name in ("logprobs", "prompt_logprobs"):
            self._integer(name, low=-1, fix="use None for none, -1 for the whole vocabulary", optional=True)

    def _check_lists(self) -> None:
        for name in ("stop", "stop_token_ids", "bad_words", "logits_processors"):
            value = getattr(self, name)
            is_list = isinstance(value, Sequence) and (name == "stop" or not isinstance(value, str))
            if value is not None and not is_list:
                raise JetSpecError(f"{name}={value!r}: must be a list; write [...] around a single one")
        if any(not isinstance(text, str) or not text for text in self.stop_strings):
            raise JetSpecError(f"stop={self.stop!r}: must be non-empty strings; use `stop_token_ids` for tokens")
        if any(not _is_id(token) for token in self.stop_token_ids or ()):
            raise JetSpecError(f"stop_token_ids={self.stop_token_ids!r}: must be token ids; use `stop` for strings")
        if any(not isinstance(word, str) or not word.strip() for word in self.bad_words or ()):
            raise JetSpecError(f"bad_words={self.bad_words!r}: must be non-empty strings; leave empty ones out")
        if any(not callable(processor) for processor in self.logits_processors or ()):
            raise JetSpecError(
                f"logits_processors={self.logits_processors!r}: must be callables (input_ids, scores) -> scores"
            )
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping) or any(not _is_id(token) for token in self.logit_bias):
            raise JetSpecError(f"logit_bias={self.logit_bias!r}: must map token ids to numbers, as {{42: -100.0}}")
        for token, bias in self.logit_bias.items():
            # -inf bans a token; +inf would make the probabilities NaN.
            if not _is_number(bias) or math.isnan(bias) or bias == math.inf:
                raise JetSpecError(
                    f"logit_bias={{{token}: {bias!r}}}: must be a number; 100 forces a token, -100 bans it"
                )

    def _integer(
        self, name: str, low: int, high: int | None = None, fix: str | None = None, optional: bool = False
    ) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if not _is_integer(value) or value < low or (high is not None and value > high):
            raise JetSpecError(_out_of_range(name, value, "an integer", low, high, fix))
        object.__setattr__(self, name, int(value))  # of numpy's, too

    def _number(self, name: str, low: float, high: float | None = None, fix: str | None = None) -> None:
        value = getattr(self, name)
        if not _is_number(value) or not math.isfinite(value) or value < low or (high is not None and value > high):
            raise JetSpecError(_out_of_range(name, value, "a number", low, high, fix))
        if not isinstance(value, int):
            object.__setattr__(self, name, float(value))

    @property
    def greedy(self) -> bool:
        """Whether each token is the argmax of its processed logits."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_processors(self) -> bool:
        """Whether anything other than the target's logits has a say in the argmax."""
        return self.has_penalties or any(
            (self.logit_bias, self.bad_words, self.min_tokens, self.structured_outputs, self.logits_processors)
        )

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def has_filters(self) -> bool:
        """Whether sampling leaves out improbable tokens."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whichever way it was given."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises JetSpecError if `logit_bias` or `stop_token_ids` name tokens that a vocabulary of this size lacks."""
        for name in ("logit_bias", "stop_token_ids"):
            bad = [token for token in getattr(self, name) or () if token >= vocab_size]
            if bad:
                raise JetSpecError(f"{name} holds token ids {bad}: the target's ids are 0 .. {vocab_size - 1}")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_id(value: Any) -> bool:
    return _is_integer(value) and value >= 0


def _out_of_range(name: str, value: object, kind: str, low: float, high: float | None, fix: str | None) -> str:
    bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
    return f"{name}={value!r}: must be {kind} {bounds}" + (f"; {fix}" if fix else "")
