"""What a request cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class RequestMetrics:
    """What one request cost. Times are seconds since the request was added."""

    prompt_tokens: int = 0
    #: Prompt tokens whose K/V another request had left in the cache.
    cached_prompt_tokens: int = 0
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
