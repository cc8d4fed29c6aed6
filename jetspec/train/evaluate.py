"""How good a head is: tokens committed per verify forward on real prompts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from jetspec.engine import Engine
from jetspec.head import DraftHead
from jetspec.sampling import SamplingParams
from jetspec.target import Target
from jetspec.train.pool import BLOCK_SIZE, blocks_for

#: Prompts that are answered at the same time.
MAX_RUNNING = 64


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
    max_running = min(MAX_RUNNING, len(prompts)) or 1
    engine = Engine(
        target,
        head,
        tree_budget=tree_budget,
        num_blocks=blocks_for([len(ids) + max_tokens for ids in prompts], max_running, tree_budget) or 1,
        block_size=BLOCK_SIZE,
        max_running=max_running,
    )
    sequences = [
        engine.add(str(i), ids, SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=i))
        for i, ids in enumerate(prompts)
    ]
    while engine.has_work:
        engine.step()
    head.train(was_training)
    rounds = sum(s.metrics.rounds for s in sequences)
    return sum(s.metrics.decoded_tokens for s in sequences) / rounds if rounds else 0.0
