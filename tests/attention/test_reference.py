"""The one-segment kernel against its formula, one query head and one key at a time."""

from __future__ import annotations

import math

import pytest
import torch

from jetspec.attention import attend


def formula(q, k, v, mask, scaling, softcap, sinks):
    """softmax over the visible keys and the sink, in float64; the sink's share is lost."""
    n, heads, _ = q.shape
    group = heads // k.shape[1]
    output = torch.zeros_like(q, dtype=torch.float64)
    for row in range(n):
        for head in range(heads):
            visible = [key for key in range(k.shape[0]) if mask is None or mask[row, key]]
            scores = [float(q[row, head].double() @ k[key, head // group].double()) * scaling for key in visible]
            if softcap is not None:
                scores = [softcap * math.tanh(score / softcap) for score in scores]
            total = sum(math.exp(score) for score in scores)
            if sinks is not None:
                total += math.exp(float(sinks[head]))
            for key, score in zip(visible, scores):
                output[row, head] += math.exp(score) / total * v[key, head // group].double()
    return output.float()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("masked", ["bool", "float", None])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_attend_is_the_formula(kv_heads, masked, softcap, with_sinks):
    generator = torch.Generator().manual_seed(kv_heads)
    q = torch.randn(5, 4, 8, generator=generator)
    k, v = torch.randn(2, 9, kv_heads, 8, generator=generator)
    sinks = torch.randn(4, generator=generator) if with_sinks else None
    visible = torch.rand(5, 9, generator=generator) < 0.5
    visible[:, 0] = True
    mask = None if masked is None else visible
    given = torch.zeros(5, 9).masked_fill(~visible, float("-inf")) if masked == "float" else mask
    expected = formula(q, k, v, mask, 0.7, softcap, sinks)
    assert torch.allclose(attend(q, k, v, given, 0.7, softcap, sinks), expected, atol=1e-5)


def test_a_single_query_reads_strided_keys():
    """Keys in a slice of the pool, as the cache gives them."""
    pool = torch.randn(2, 40, 2, 8, generator=torch.Generator().manual_seed(3))
    q, k, v = torch.randn(1, 4, 8), pool[0, 7:20], pool[1, 7:20]
    assert torch.allclose(attend(q, k, v, None, 0.3), formula(q, k, v, None, 0.3, None, None), atol=1e-5)
