"""Drafts at the temperature that a sequence is sampled at."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from jetspec.engine.sequence import Sequence


def tempered(logits: torch.Tensor, sequences: Seq[Sequence]) -> torch.Tensor:
    """Logits [S, .., V] at the temperature each sequence is sampled at; the likely paths are those of the target's
    tempered distribution."""
    scale = temperatures(sequences)
    if bool((scale == 1).all()):
        return logits
    return logits / scale.to(logits.device).view(-1, *[1] * (logits.dim() - 1))


def temperatures(sequences: Seq[Sequence]) -> torch.Tensor:
    """[S]: what a draft's logits are divided by. Greedy ones keep theirs: their distribution has but one token."""
    return torch.tensor([1.0 if s.params.greedy else s.params.temperature for s in sequences])
