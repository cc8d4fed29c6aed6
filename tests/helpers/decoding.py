"""Plain decoding through transformers alone: the whole sequence is recomputed for every token."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from jetspec.sampling import SamplingParams, process, sample


@torch.inference_mode()
def decode(
    model: PreTrainedModel, prompt: list[int], params: SamplingParams, eos: frozenset[int], seed: int
) -> tuple[list[int], str]:
    """Output tokens and finish reason of one request, with nothing of the engine involved."""
    output: list[int] = []
    stops = set(params.stop_token_ids or ())
    limit = model.config.max_position_embeddings - len(prompt)
    budget = limit if params.max_tokens is None else min(limit, params.max_tokens)
    while True:
        logits = model(torch.tensor([prompt + output]), use_cache=False).logits[0, -1].float()
        token = sample(process(logits, params, prompt, output, eos), params, seed, len(prompt) + len(output))
        output.append(token)
        if token in stops or (token in eos and not params.ignore_eos):
            return output, "stop"
        if len(output) >= budget:
            return output, "length"
