"""From the target's logits to the distribution a request asked for, one token at a time along the accepted walk.

Order: penalties, bias, banned tokens and the grammar, the user's processors, temperature, top-k, top-p, min-p. Every
step is a pure function: it returns new scores or the very ones it got.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from jetspec.errors import JetSpecError
from jetspec.sampling import filters
from jetspec.sampling.params import LogitsProcessor, SamplingParams
from jetspec.sampling.structured import Grammar


def process(
    logits: Tensor,
    params: SamplingParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    eos_token_ids: Collection[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
    grammar: Grammar | None = None,
) -> Tensor:
    """The scores [V] (float32) that `sample` chooses the next token from.

    Args:
        logits: the target's, [V]; never changed.
        params: the request's; its `bad_words` are honoured through the argument of that name.
        prompt_ids: the prompt.
        output_ids: the answer so far, exactly the tokens that lead to this row.
        eos_token_ids: held back with the stop tokens until `min_tokens`.
        bad_words: `params.bad_words` as token ids, from `encode_bad_words`.
        grammar: `params.structured_outputs` after `output_ids`, from `new_grammar`.

    Raises:
        JetSpecError: a user's processor raised an error or returned something of another shape; the bad words' token
            ids or the grammar are missing, or the grammar became too complex to follow.
    """
    scores = logits.float()
    if params.has_processors:
        if params.has_penalties:
            scores = penalize(scores, params, prompt_ids, output_ids)
        if params.logit_bias:
            scores = add_bias(scores, params.logit_bias)
        if params.bad_words and not bad_words:
            raise JetSpecError("bad_words: their token ids are missing; pass encode_bad_words(tokenizer, words)")
        banned = banned_tokens(output_ids, bad_words)
        if len(output_ids) < params.min_tokens:
            banned |= {*eos_token_ids, *(params.stop_token_ids or ())}
        if banned:
            scores = scores.index_fill(0, torch.tensor(sorted(banned), device=scores.device), -torch.inf)
        if params.structured_outputs is not None:
            if grammar is None:
                raise JetSpecError("structured_outputs: their grammar is missing; pass one from new_grammar")
            scores = scores.masked_fill(~grammar.allowed(len(scores), scores.device), -torch.inf)
        for processor in params.logits_processors or ():
            scores = _run_user(processor, scores, prompt_ids, output_ids)
    if params.greedy:
        return scores
    if params.temperature != 1:
        scores = scores / params.temperature
    if params.top_k > 0:
        scores = filters.top_k(scores, params.top_k)
    if params.top_p < 1:
        scores = filters.top_p(scores, params.top_p)
    if params.min_p > 0:
        scores = filters.min_p(scores, params.min_p)
    return scores


def penalize(scores: Tensor, params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Tensor:
    """Repetition penalty over prompt and answer; frequency and presence penalties over the answer."""
    output = torch.tensor(output_ids, dtype=torch.int64, device=scores.device)
    if params.repetition_penalty != 1:
        seen = torch.cat([torch.tensor(prompt_ids, dtype=torch.int64, device=scores.device), output]).unique()
        old = scores[seen]
        penalty = params.repetition_penalty
        scores = scores.index_copy(0, seen, torch.where(old > 0, old / penalty, old * penalty))
    if len(output) and (params.frequency_penalty or params.presence_penalty):
        tokens, counts = output.unique(return_counts=True)
        scores = scores.index_add(0, tokens, -(params.frequency_penalty * counts + params.presence_penalty))
    return scores


def add_bias(scores: Tensor, bias: Mapping[int, float]) -> Tensor:
    """Scores [V] with `bias` added to the tokens it names."""
    ids = torch.tensor(list(bias), device=scores.device)
    return scores.index_add(0, ids, torch.tensor(list(bias.values()), dtype=scores.dtype, device=scores.device))


def banned_tokens(output_ids: Sequence[int], bad_words: Sequence[Sequence[int]]) -> set[int]:
    """Tokens that would complete one of the token sequences `bad_words` within the answer."""
    return {
        word[-1]
        for word in bad_words
        if len(word) <= len(output_ids) + 1 and list(output_ids[len(output_ids) - len(word) + 1 :]) == list(word[:-1])
    }


def _run_user(
    processor: LogitsProcessor, scores: Tensor, prompt_ids: Sequence[int], output_ids: Sequence[int]
) -> Tensor:
    ids = torch.tensor([[*prompt_ids, *output_ids]], dtype=torch.int64, device=scores.device)
    name = getattr(processor, "__qualname__", type(processor).__qualname__)
    try:
        # A copy: many processors write to the scores they are given.
        result = processor(ids, scores.clone().unsqueeze(0))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit and cancellations too: they end this request, not what runs beside it
        raise JetSpecError(f"logits_processors: {name} raised {error!r}") from error
    if not isinstance(result, Tensor) or result.shape != (1, len(scores)):
        got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise JetSpecError(f"logits_processors: {name} returned {got}, must return scores (1, {len(scores)})")
    return result[0].to(scores)
