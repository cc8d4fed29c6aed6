"""Reported log probabilities against sorting the whole vocabulary."""

import pytest
import torch

from jetspec.sampling import top_logprobs


@pytest.mark.parametrize("k", [0, 1, 5, 30, 99, -1])
def test_against_sorting(k):
    logits = (torch.randn(3, 30, generator=torch.Generator().manual_seed(0)) * 2).round()  # with ties
    tokens = [4, 0, 29]
    for row, entries in enumerate(top_logprobs(logits, tokens, k)):
        log_probs = logits[row].log_softmax(0).tolist()
        order = sorted(range(30), key=lambda token: (-logits[row, token].item(), token))
        expected = [tokens[row]] + [t for t in order[: 30 if k == -1 else k] if t != tokens[row]]
        assert list(entries) == expected
        for token, entry in entries.items():
            assert entry.rank == order.index(token) + 1
            assert entry.logprob == pytest.approx(log_probs[token], abs=1e-5)


def test_rows_do_not_depend_on_their_batch():
    """Fault 10: a verify forward's rows report what plain decoding's single rows do."""
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    together = top_logprobs(logits, [1, 2, 3, 4, 5], 4)
    assert together == [top_logprobs(logits[i : i + 1], [i + 1], 4)[0] for i in range(5)]
