"""What a request asks of its tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from numbers import Integral, Real
from typing import Annotated, Any

from pydantic import BeforeValidator, SkipValidation, field_validator, model_validator
from torch import Tensor
from typing_extensions import Self

from jetspec.config import Config, option
from jetspec.errors import JetSpecError
from jetspec.sampling.structured import StructuredOutputsParams

#: transformers' interface: (input_ids [1, t], scores [1, V]) -> scores [1, V].
LogitsProcessor = Callable[[Tensor, Tensor], Tensor]

#: Temperatures below this are greedy: dividing by them would leave nothing but the argmax.
GREEDY_BELOW = 1e-5


def _plain_integer(value: Any) -> Any:
    return int(value) if _is_integer(value) else value


def _plain_number(value: Any) -> Any:
    if not isinstance(value, Real) or isinstance(value, bool):
        return value
    try:
        return float(value)
    except OverflowError:  # of an integer beyond the range of floats, which is then refused
        return value


#: Numbers as they are kept; numpy's are taken too.
Integer = Annotated[int, BeforeValidator(_plain_integer)]
Number = Annotated[float, BeforeValidator(_plain_number)]


class SamplingParams(Config):
    """How to choose tokens and when to stop. Names and meanings follow vLLM.

    Raises:
        JetSpecError: a value is out of range; the message names the field and the fix.
    """

    n: Integer = option(1, ge=1, help="Answers to a prompt; the first one equals that of n=1.")
    temperature: Number = option(
        1.0, ge=0, allow_inf_nan=False, help="0 is greedy decoding.", fix="use 0 for greedy decoding"
    )
    top_p: Number = option(
        1.0,
        gt=0,
        le=1,
        allow_inf_nan=False,
        help="Keep the most probable tokens that together reach this probability.",
        fix="use 1 to keep all tokens",
    )
    top_k: Integer = option(
        0,
        ge=-1,
        help="Keep this many most probable tokens, and any as probable as the last of them; 0 or -1 keeps all.",
        fix="use 0 or -1 to keep all tokens",
    )
    min_p: Number = option(
        0.0,
        ge=0,
        le=1,
        allow_inf_nan=False,
        help="Drop tokens less probable than this share of the most probable one.",
        fix="use 0 to keep all tokens",
    )
    repetition_penalty: Number = option(
        1.0,
        gt=0,
        allow_inf_nan=False,
        help="Divides the positive logits of tokens in prompt or answer and multiplies the negative ones.",
        fix="use 1 for none",
    )
    frequency_penalty: Number = option(
        0.0,
        ge=-2,
        le=2,
        allow_inf_nan=False,
        help="Taken off a token's logit for every time the answer holds it.",
        fix="use 0 for none",
    )
    presence_penalty: Number = option(
        0.0,
        ge=-2,
        le=2,
        allow_inf_nan=False,
        help="Taken off a token's logit if the answer holds it.",
        fix="use 0 for none",
    )
    seed: Integer | None = option(
        None,
        ge=-(2**63),
        le=2**64 - 1,
        help="Makes the answer reproducible; None takes noise that no other request uses.",
        fix="use None for no seed",
    )
    stop: SkipValidation[str | Sequence[str] | None] = option(None, help="Strings that end the answer.")
    stop_token_ids: SkipValidation[Sequence[int] | None] = option(None, help="Tokens that end the answer.")
    bad_words: SkipValidation[Sequence[str] | None] = option(None, help="Strings that the answer must not hold.")
    ignore_eos: bool = option(False, help="Run on past the target's end-of-text tokens.")
    max_tokens: Integer | None = option(
        16,
        ge=1,
        help="Tokens to generate at most; None allows what the context holds.",
        fix="use None for as many as the context holds",
    )
    min_tokens: Integer = option(
        0, ge=0, help="No end-of-text token, stop token or stop string before this many tokens."
    )
    logprobs: Integer | None = option(
        None,
        ge=-1,
        help="Report log probabilities of the chosen token and of this many most probable ones; -1: all tokens.",
        fix="use None for none, -1 for the whole vocabulary",
    )
    prompt_logprobs: Integer | None = option(
        None,
        ge=-1,
        help="The same for the prompt's tokens.",
        fix="use None for none, -1 for the whole vocabulary",
    )
    logit_bias: SkipValidation[Mapping[int, float] | None] = option(None, help="Added to the logits of these tokens.")
    logits_processors: SkipValidation[Sequence[LogitsProcessor] | None] = option(
        None, help="Called in order with (ids so far [1, t], scores [1, V]), as transformers does."
    )
    skip_special_tokens: bool = option(True, help="Leave special tokens out of the text.")
    include_stop_str_in_output: bool = option(False, help="Keep the stop string that ended the answer in its text.")
    structured_outputs: SkipValidation[StructuredOutputsParams | None] = option(
        None,
        help="The form that the answer must have. The answer ends, with finish_reason stop, where nothing can follow, "
        "also with ignore_eos; one that must end before min_tokens fails.",
    )

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, value: Any) -> Any:
        texts = () if value is None else (value,) if isinstance(value, str) else value
        if not isinstance(texts, Sequence) or any(not isinstance(text, str) or not text for text in texts):
            raise JetSpecError(
                f"stop={value!r:.80}: must be a non-empty string or a list of them; use stop_token_ids for tokens"
            )
        return value

    @field_validator("stop_token_ids")
    @classmethod
    def _check_stop_token_ids(cls, value: Any) -> Any:
        if value is not None and not _is_list_of(value, _is_id):
            raise JetSpecError(f"stop_token_ids={value!r:.80}: must be a list of token ids; use stop for strings")
        return value

    @field_validator("bad_words")
    @classmethod
    def _check_bad_words(cls, value: Any) -> Any:
        if value is not None and not _is_list_of(value, lambda word: isinstance(word, str) and bool(word.strip())):
            raise JetSpecError(f"bad_words={value!r:.80}: must be a list of non-empty strings; leave empty ones out")
        return value

    @field_validator("logits_processors")
    @classmethod
    def _check_logits_processors(cls, value: Any) -> Any:
        if value is not None and not _is_list_of(value, callable):
            raise JetSpecError(
                f"logits_processors={value!r:.80}: must be a list of callables (input_ids, scores) -> scores"
            )
        return value

    @field_validator("logit_bias")
    @classmethod
    def _check_logit_bias(cls, value: Any) -> Any:
        if value is None:
            return value
        if not isinstance(value, Mapping) or not all(map(_is_id, value)):
            raise JetSpecError(f"logit_bias={value!r:.80}: must map token ids to numbers, as {{42: -100.0}}")
        for token, bias in value.items():
            # -inf bans a token; +inf would make the probabilities NaN.
            number = _plain_number(bias)
            if not isinstance(number, float) or math.isnan(number) or number == math.inf:
                raise JetSpecError(
                    f"logit_bias={{{token}: {bias!r}}}: must be a number; 100 forces a token, -100 bans it"
                )
        return value

    @field_validator("structured_outputs")
    @classmethod
    def _check_structured_outputs(cls, value: Any) -> Any:
        if not isinstance(value, StructuredOutputsParams | None):
            raise JetSpecError(f"structured_outputs={value!r:.80}: must be StructuredOutputsParams, or None for none")
        return value

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.greedy and self.n > 1:
            raise JetSpecError(f"n={self.n}: greedy answers are all the same; use n=1, or a temperature above 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise JetSpecError(
                f"min_tokens={self.min_tokens}: must not exceed max_tokens={self.max_tokens}; raise max_tokens"
            )
        return self

    # Cached, since they are read for every token.

    @cached_property
    def greedy(self) -> bool:
        """Whether each token is the argmax of its processed logits."""
        return self.temperature < GREEDY_BELOW

    @cached_property
    def has_processors(self) -> bool:
        """Whether anything other than the target's logits has a say in the argmax."""
        return self.has_penalties or any(
            (self.logit_bias, self.bad_words, self.min_tokens, self.structured_outputs, self.logits_processors)
        )

    @cached_property
    def has_penalties(self) -> bool:
        """Whether tokens of prompt or answer are penalized."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @cached_property
    def has_filters(self) -> bool:
        """Whether sampling leaves out improbable tokens."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @cached_property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whichever way it was given."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check that a vocabulary holds the tokens that `logit_bias` and `stop_token_ids` name.

        Raises:
            JetSpecError: one lies outside `vocab_size`.
        """
        for name in ("logit_bias", "stop_token_ids"):
            bad = [token for token in getattr(self, name) or () if token >= vocab_size]
            if bad:
                raise JetSpecError(f"{name} holds token ids {bad}: the target's ids are 0 .. {vocab_size - 1}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_id(value: Any) -> bool:
    return _is_integer(value) and value >= 0


def _is_list_of(value: Any, holds: Callable[[Any], bool]) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(map(holds, value))
