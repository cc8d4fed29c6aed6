"""How good a head is: tokens committed per verify forward on real prompts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from jetspec.engine import Engine
from jetspec.head import DraftHead
from jetspec.sampling import SamplingParams
from jetspec.target import Target


@torch.inference_mode()
def acceptance_length(
    target: Target,
    head: DraftHead,
    prompts: Sequence[Sequence[int]],
    *,
    tree_budget: int = 16,
    max_tokens: int = 128,
    temperature: float = 0.0,
) -> float:
    """Mean tokens per verify forward, bonus included, over all rounds of all ``prompts`` (token ids), run together.

    With sampling, prompt i is seeded with i. 0.0 where no prompt needed a round.
    """
    was_training = head.training
    head.eval()
    engine = Engine(target, head, tree_budget=tree_budget, max_running=len(prompts) or 1)
    sequences = [
        engine.add(str(i), ids, SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=i))
        for i, ids in enumerate(prompts)
    ]
    while engine.has_work:
        engine.step()
    head.train(was_training)
    rounds = sum(s.metrics.rounds for s in sequences)
    return sum(s.metrics.decoded_tokens for s in sequences) / rounds if rounds else 0.0
