"""Acceptance: the target's own next tokens, followed through a draft tree for as long as the tree contains them."""

from __future__ import annotations

from torch import Tensor

from jetspec.engine.batch import ScheduledSequence
from jetspec.errors import JetSpecError
from jetspec.sampling import process, sample, top_logprobs
from jetspec.tree import Walk, child_rows


def accept(scheduled: ScheduledSequence, logits: Tensor, choices: list[int]) -> None:
    """Append the target's tokens to the sequence, and note the walk that they make through its tree.

    The walk ends at a token that no child carries (the bonus) or that ends the request. An error of the request's own,
    in a logits processor say, fails this request alone.

    Args:
        scheduled: the sequence with its rows.
        logits: [rows, vocab_size] of the round.
        choices: the most probable token of every row of logits, -1 where the row is not finite.
    """
    sequence = scheduled.sequence
    known = scheduled.num_known
    children = child_rows(scheduled.token_ids[known:], scheduled.parents[known:])
    walk = Walk(rows=[0], tokens=[])
    try:
        while True:
            token = next_token(scheduled, walk.rows[-1], logits, choices)
            sequence.append(token)
            walk.tokens.append(token)
            child = children.get((walk.rows[-1], token))
            if sequence.finished or child is None:
                break
            walk.rows.append(child)
    except Exception as error:
        del sequence.logprobs[sequence.num_output :]  # of a token that was refused
        sequence.fail(error)
        return
    scheduled.walk = walk
    if scheduled.decodes:
        sequence.metrics.rounds += 1
        sequence.metrics.tree_rows += len(scheduled)
        sequence.metrics.decoded_tokens += len(walk.tokens)


def next_token(scheduled: ScheduledSequence, row: int, logits: Tensor, choices: list[int]) -> int:
    """The target's token after row `row` of the tree: a draw from the processed distribution, or the argmax if greedy.

    Raises:
        JetSpecError: the target's logits are not finite, or the request's own settings leave no token.
    """
    sequence, index = scheduled.sequence, scheduled.logits_start + row
    params = sequence.params
    if choices[index] < 0:
        raise not_finite(len(sequence.token_ids))
    if params.greedy and not params.has_processors:
        token = choices[index]
    else:
        processed = process(
            logits[index],
            params,
            sequence.prompt_ids,
            sequence.output_ids,
            sequence.eos_token_ids,
            sequence.bad_words,
            sequence.grammar,
        )
        token = sample(processed, params, sequence.seed, len(sequence.token_ids))
    if params.logprobs is not None:
        sequence.logprobs += top_logprobs(logits[index : index + 1], [token], params.logprobs)
    return token


def score_prompt(scheduled: ScheduledSequence, logits: Tensor, choices: list[int]) -> None:
    """Record the log probabilities of the prompt tokens that follow the rows; logits that are not finite fail it."""
    sequence = scheduled.sequence
    first = scheduled.context_len + 1
    scored = sequence.prompt_ids[first : first + len(scheduled)]
    # After a preemption rows are scored again; what is known stays.
    new = scored[max(0, len(sequence.prompt_logprobs) - first) :]
    if not new:
        return
    assert sequence.params.prompt_logprobs is not None
    start = scheduled.logits_start - scheduled.num_known + len(scored) - len(new)
    if min(choices[start : start + len(new)]) < 0:
        sequence.fail(not_finite(first + len(scored) - len(new)))
        return
    sequence.prompt_logprobs += top_logprobs(logits[start : start + len(new)], new, sequence.params.prompt_logprobs)


def not_finite(position: int) -> JetSpecError:
    """The error of a request whose target gives NaN or infinite logits."""
    return JetSpecError(
        f"the target's logits at position {position} are not finite; check its weights, or load it in another number "
        "type (dtype='float32', say)"
    )
