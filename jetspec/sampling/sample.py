"""Choose a token from processed logits."""

import torch
from torch import Tensor

from jetspec.errors import JetSpecError
from jetspec.sampling.noise import gumbel_of, uniform
from jetspec.sampling.params import SamplingParams

#: Scores this close are compared again with noise that is the same on every device. The device's own logarithm is off
#: by less than 1e-13, so any other order of scores is already the final one.
_NEAR = 1e-6


def sample(logits: Tensor, params: SamplingParams, seed: int, position: int) -> int:
    """The token chosen from logits [V] as `process` returns them.

    Greedy: the argmax. Otherwise a draw from their softmax: the argmax of logits + Gumbel noise keyed by (seed,
    position, token id), where `position` is the absolute position the token will take. Equal scores: the lower id.
    Raises JetSpecError if no token has a probability.
    """
    if params.greedy:
        token = int(logits.argmax())
        _check(logits[token])
        return token
    if params.has_filters:
        ids = (logits > -torch.inf).nonzero().squeeze(1)
        logits = logits[ids]
    else:
        ids = torch.arange(len(logits), device=logits.device)
    if not len(ids):
        raise JetSpecError(_NO_TOKEN)
    u = uniform(seed, position, ids)
    logits = logits.double()
    scores = logits - (-u.log()).log()
    best = scores.max()
    _check(best)
    near = (scores >= best - _NEAR).nonzero().squeeze(1)
    if len(near) > 1:
        near = near[(logits[near] + gumbel_of(u[near])).argmax()]
    return int(ids[near])


_NO_TOKEN = (
    "every token is banned or its logit is NaN: check structured_outputs with min_tokens, logit_bias, bad_words, "
    "logits_processors and the target's dtype"
)


def _check(best: Tensor) -> None:
    if not bool(best > -torch.inf):
        raise JetSpecError(_NO_TOKEN)
