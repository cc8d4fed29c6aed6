"""Log probabilities reported to the user: of the target's own logits, before any processing."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jetspec.sampling.filters import best_first


@dataclass(frozen=True)
class Logprob:
    """One token's log probability and its rank (1: most probable; of equal ones the lower id is first)."""

    logprob: float
    rank: int
    decoded_token: str | None = None


def top_logprobs(logits: Tensor, tokens: Sequence[int], k: int) -> list[dict[int, Logprob]]:
    """Per row of logits [R, V] the chosen token first, then the k most probable ones by rank (k = -1: all).

    A chosen token that is among the k appears once, so a row holds k or k + 1 entries.
    """
    vocab_size = logits.shape[-1]
    k = vocab_size if k == -1 else min(k, vocab_size)
    log_probs = logits.float().log_softmax(-1)
    chosen = torch.tensor(tokens, device=logits.device).unsqueeze(1)
    chosen_logits = logits.gather(1, chosen)
    equal_before = (logits == chosen_logits).cumsum(1).gather(1, chosen)
    ranks = ((logits > chosen_logits).sum(1, keepdim=True) + equal_before).squeeze(1).tolist()
    chosen_log_probs = log_probs.gather(1, chosen).squeeze(1).tolist()
    top = torch.stack([best_first(row, k)[1][:k] if k else chosen[0, :0] for row in logits])
    top_log_probs = log_probs.gather(1, top).tolist()
    rows: list[dict[int, Logprob]] = []
    for row, ids in enumerate(top.tolist()):
        entries = {tokens[row]: Logprob(chosen_log_probs[row], ranks[row])}
        for rank, (token, log_prob) in enumerate(zip(ids, top_log_probs[row], strict=True), start=1):
            entries.setdefault(token, Logprob(log_prob, rank))
        rows.append(entries)
    return rows
