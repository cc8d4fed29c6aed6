"""One request's running state."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from jetspec.detokenize import IncrementalDetokenizer
from jetspec.engine.blocks import BlockTable
from jetspec.sampling import SamplingParams


@dataclass
class RequestMetrics:
    """What one request cost. Times are seconds since the request was added."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    #: Verify forwards that decoded for this request (prompt chunks do not count).
    rounds: int = 0
    #: Rows those forwards scored for this request, roots included.
    tree_rows: int = 0
    #: Tokens those forwards committed: all but those that came with a prompt chunk.
    decoded_tokens: int = 0
    preemptions: int = 0
    first_token_s: float | None = None
    total_s: float | None = None

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per verify forward, bonus included (the paper's tau); 0 before the first round."""
        return self.decoded_tokens / self.rounds if self.rounds else 0.0

    @property
    def decode_s(self) -> float:
        """Seconds from the first token to the last."""
        if self.first_token_s is None or self.total_s is None:
            return 0.0
        return self.total_s - self.first_token_s


@dataclass
class Sequence:
    """Tokens, cache blocks and finish state of one request.

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
    token_ids: list[int] = field(default_factory=list)
    num_cached: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    text: str = ""
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    added_at: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_ids)
        self.metrics.prompt_tokens = len(self.prompt_ids)
        self._stop_ids = frozenset(self.params.stop_token_ids or ())

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_ids) :]

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - len(self.prompt_ids)

    @property
    def anchor(self) -> int:
        return self.token_ids[-1]

    @property
    def is_decoding(self) -> bool:
        """Whether all but the newest token are in the cache, so that the next round may draft."""
        return self.num_output > 0 and self.num_cached == len(self.token_ids) - 1

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def max_depth(self) -> int:
        """Deepest draft node that can still be emitted: one token of the allowance is the round's bonus."""
        return self.max_new_tokens - self.num_output - 1

    def append(self, token: int) -> bool:
        """Take the target's next token; returns whether the request is finished with it. A stop wins over the length."""
        self.token_ids.append(token)
        self.metrics.completion_tokens += 1
        if self.metrics.first_token_s is None:
            self.metrics.first_token_s = time.perf_counter() - self.added_at
        if token in self._stop_ids:
            self.finish("stop", token)
        elif token in self.eos_token_ids and not self.params.ignore_eos:
            self.finish("stop")
        elif self.num_output >= self.max_new_tokens:
            self.finish("length")
        return self.finished

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self.metrics.total_s = time.perf_counter() - self.added_at

    def take_text(self, new_ids: Seq[int]) -> str:
        """Text that `new_ids` complete; a cut multi-byte character waits for its rest unless the request is finished."""
        if self.detokenizer is None:
            return ""
        new = self.detokenizer.push(new_ids)
        if self.finished:
            new += self.detokenizer.flush()
        self.text += new
        return new
