"""One request's running state."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from jetspec.attention.blocks import BlockTable
from jetspec.detokenize import IncrementalDetokenizer
from jetspec.metrics import RequestMetrics
from jetspec.sampling import Grammar, Logprob, SamplingParams, StopChecker


@dataclass(eq=False)
class Sequence:
    """Tokens, cache blocks and finish state of one request; equal to itself only.

    `num_cached` tokens have their K/V committed. While decoding it is `len(token_ids) - 1`: the newest token, the
    anchor of the next draft, has not been through the target yet.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    eos_token_ids: frozenset[int]
    max_new_tokens: int
    table: BlockTable
    detokenizer: IncrementalDetokenizer | None = None
    bad_words: list[list[int]] = field(default_factory=list)
    grammar: Grammar | None = None
    token_ids: list[int] = field(default_factory=list)
    num_cached: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None
    text: str = ""
    #: Per output token, and per prompt token (None for the first), where the request asks for them.
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=lambda: [None])
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    added_at: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_ids)
        self.metrics.prompt_tokens = len(self.prompt_ids)
        self._stop_ids = frozenset(self.params.stop_token_ids or ())
        self._stop_strings = StopChecker(self.params.stop_strings, self.params.include_stop_str_in_output)
        self._taken = 0

    @property
    def output_ids(self) -> list[int]:
        """The tokens of the answer so far, without the prompt's."""
        return self.token_ids[len(self.prompt_ids) :]

    @property
    def num_output(self) -> int:
        """The number of the answer's tokens so far."""
        return len(self.token_ids) - len(self.prompt_ids)

    @property
    def anchor(self) -> int:
        """The newest token, from which the next draft tree grows."""
        return self.token_ids[-1]

    @property
    def is_decoding(self) -> bool:
        """Whether all but the newest token are in the cache, so that the next round may draft."""
        return self.num_output > 0 and self.num_cached == len(self.token_ids) - 1

    @property
    def finished(self) -> bool:
        """Whether the answer has ended, for whatever reason."""
        return self.finish_reason is not None

    @property
    def max_depth(self) -> int:
        """Deepest draft node that can still be emitted: one token of the allowance is the round's bonus."""
        return self.max_new_tokens - self.num_output - 1

    def append(self, token: int) -> bool:
        """Take the target's next token; returns whether the request ends with it. A stop wins over the length.

        Raises:
            JetSpecError: the request's grammar does not allow the token.
        """
        if self.grammar is not None:
            self.grammar.advance(token)
        self.token_ids.append(token)
        self.metrics.completion_tokens += 1
        if self.metrics.first_token_s is None:
            self.metrics.first_token_s = time.perf_counter() - self.added_at
        if token in self._stop_ids:
            self.finish("stop", token)
        elif token in self.eos_token_ids and not self.params.ignore_eos:
            self.finish("stop")
        else:
            self._add_text(token)
            if self._stop_strings.matched is not None:
                self.finish("stop", self._stop_strings.matched)
            elif self.grammar is not None and self.grammar.complete and self.num_output >= self.params.min_tokens:
                self.finish("stop")
            elif self.num_output >= self.max_new_tokens:
                self.finish("length")
        return self.finished

    def _add_text(self, token: int) -> None:
        if self.detokenizer is not None:
            enabled = self.num_output > self.params.min_tokens
            self.text += self._stop_strings.push(self.detokenizer.push([token]), enabled)

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """End the request; text that was held back, for a stop string or a character, is shown now."""
        if isinstance(stop_reason, int) and self.params.include_stop_str_in_output:
            self._add_text(stop_reason)
        if self.detokenizer is not None and self._stop_strings.matched is None:
            self.text += self._stop_strings.push(self.detokenizer.flush(), enabled=False) + self._stop_strings.flush()
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self.metrics.total_s = time.perf_counter() - self.added_at

    def fail(self, error: Exception) -> None:
        """End the request because of an error of its own."""
        self.error = error
        self.finish("error")

    def take_text(self) -> str:
        """Text since the last call. A stop string that may be beginning and a cut character wait for what follows."""
        new = self.text[self._taken :]
        self._taken = len(self.text)
        return new
