"""From a prompt and its parameters to a sequence that the engine can run."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from jetspec.attention.blocks import BlockManager, BlockTable
from jetspec.detokenize import IncrementalDetokenizer
from jetspec.engine.sequence import Sequence
from jetspec.errors import JetSpecError
from jetspec.models.target import Target
from jetspec.sampling import SamplingParams, encode_bad_words, new_grammar


def plain_ids(prompt: Any) -> list[int] | None:
    """Token ids as plain integers, whether they came in a list, an array or a tensor; None if they are something else.

    They may lie outside any vocabulary.
    """
    if not is_list(prompt) or any(isinstance(token, bool) for token in prompt):
        return None
    try:
        return [operator.index(token) for token in prompt]
    except TypeError:
        return None


def is_list(value: object) -> bool:
    """Whether a value holds items in order: a list, a tuple, an array or a tensor, say, but no text."""
    if getattr(value, "ndim", None) == 0 or isinstance(value, str | bytes | Mapping):
        return False
    return hasattr(value, "__len__") and hasattr(value, "__getitem__")


def check_request(target: Target, num_slots: int, prompt_ids: Seq[int], params: SamplingParams) -> int:
    """Tokens that a request may generate at most.

    Raises:
        JetSpecError: the prompt is empty, holds an id outside the vocabulary, or does not fit the context or the
            `num_slots` of the K/V cache; or the parameters ask for what the target cannot give.
    """
    if not prompt_ids:
        raise JetSpecError("prompt is empty: give at least one token (a chat template or a bos token adds some)")
    bad = [t for t in prompt_ids if not 0 <= t < target.num_embeddings]
    if bad:
        raise JetSpecError(f"prompt holds token id {bad[0]!r}: ids of this target are 0 .. {target.num_embeddings - 1}")
    params.check_vocabulary(target.vocab_size)
    if (params.stop_strings or params.bad_words) and target.tokenizer is None:
        raise JetSpecError(
            "stop and bad_words need a tokenizer: this target has none, use stop_token_ids or logit_bias"
        )
    limit = target.max_context
    if len(prompt_ids) >= limit:
        raise JetSpecError(
            f"prompt has {len(prompt_ids)} tokens, the target's context holds {limit} with the answer: "
            "shorten the prompt"
        )
    room = limit - len(prompt_ids)
    max_new = room if params.max_tokens is None else min(params.max_tokens, room)
    if len(prompt_ids) + max_new > num_slots:
        raise JetSpecError(
            f"prompt of {len(prompt_ids)} and {max_new} new tokens need more than the K/V cache's {num_slots} slots: "
            "lower max_tokens or raise num_blocks"
        )
    return max_new


def new_sequence(
    request_id: str,
    prompt_ids: Seq[int],
    params: SamplingParams,
    *,
    target: Target,
    blocks: BlockManager,
) -> Sequence:
    """The state of a request that has not run yet.

    Raises:
        JetSpecError: an argument has another type, the grammar is not valid, or `check_request` refuses the request.
    """
    if not isinstance(request_id, str):
        raise JetSpecError(f"request_id={request_id!r:.80}: must be text")
    if not isinstance(params, SamplingParams):
        raise JetSpecError(f"params: must be SamplingParams, not {params!r:.80}")
    ids = plain_ids(prompt_ids)
    if ids is None:
        raise JetSpecError(f"prompt: must be a list of token ids, not {prompt_ids!r:.80}")
    max_new_tokens = check_request(target, blocks.num_slots, ids, params)
    tokenizer, structured = target.tokenizer, params.structured_outputs
    return Sequence(
        request_id=request_id,
        prompt_ids=ids,
        params=params,
        seed=params.seed or 0,
        eos_token_ids=target.eos_token_ids,
        max_new_tokens=max_new_tokens,
        table=BlockTable(blocks),
        detokenizer=None if tokenizer is None else IncrementalDetokenizer(tokenizer, params.skip_special_tokens),
        bad_words=encode_bad_words(tokenizer, params.bad_words or ()),
        grammar=None if structured is None else new_grammar(tokenizer, target.eos_token_ids, structured),
    )
