"""The ancestor mask against following parent pointers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec.errors import JetSpecError
from jetspec.tree import ancestor_mask, chain_parents


def follow(parents, row):
    path = [row]
    while parents[path[-1]] != -1:
        path.append(parents[path[-1]])
    return path


@settings(max_examples=60)
@given(st.data())
def test_mask_and_depths_follow_the_parents(data):
    n = data.draw(st.integers(0, 40))
    parents = [data.draw(st.integers(-1, row - 1)) for row in range(n)]
    tensor = torch.tensor(parents, dtype=torch.int64)
    mask = ancestor_mask(tensor)
    assert mask.shape == (n, n)
    assert mask.dtype == torch.bool
    for row in range(n):
        assert mask[row].nonzero().flatten().tolist() == sorted(follow(parents, row))


@pytest.mark.parametrize("n", [0, 1, 2, 3, 64, 100])
def test_a_chain_is_causal(n):
    parents = chain_parents(n)
    assert torch.equal(ancestor_mask(parents), torch.ones(n, n).tril().bool())


@pytest.mark.parametrize("parents", [[0], [-1, 2, 0], [-2]])
def test_wrong_parents_are_refused(parents):
    with pytest.raises(JetSpecError, match="earlier row"):
        ancestor_mask(torch.tensor(parents))
