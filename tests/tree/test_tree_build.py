"""The tree is the N most probable prefixes, with a total tie order, alone or in a ragged batch."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec.errors import JetSpecError
from jetspec.tree import grow_trees, shared_children, top_candidates
from jetspec.tree.order import first_by_value
from tests.helpers.trees import build_forest

INF = float("inf")
# Few distinct values: exact ties within and across depths are the rule, and sums of them are exact.
VALUES = [0.0, -0.0, -0.25, -0.5, -1.0, -1.5, -3.0, -INF]


def brute_force(anchor, log_probs, candidates, budget, max_depth=None):
    """All prefixes of K^D, sorted: (tokens, parents, depths, path log probabilities) of the best `budget` nodes."""
    depth, ranks = log_probs.shape
    nodes = []
    for d in range((depth if max_depth is None else min(depth, max_depth)) + 1):
        for path in itertools.product(range(ranks), repeat=d):
            total = torch.zeros(())
            for level, rank in enumerate(path):
                total = total + log_probs[level, rank]
            if total > -INF:
                nodes.append((-total.item(), d, path))
    chosen = sorted(sorted(nodes)[:budget], key=lambda node: node[1:])
    index = {path: i for i, (_, _, path) in enumerate(chosen)}
    tokens = [int(candidates[d - 1, path[-1]]) if d else anchor for _, d, path in chosen]
    parents = [index[path[:-1]] if d else -1 for _, d, path in chosen]
    return tokens, parents, [d for _, d, _ in chosen], [-negative for negative, _, _ in chosen]


def tree(forest, index):
    rows = forest.rows(index)
    return tuple(part[rows].tolist() for part in (forest.tokens, forest.parents, forest.depths, forest.log_probs))


@st.composite
def batches(draw):
    sequences, depth, ranks = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    entry = st.sampled_from(VALUES) if draw(st.booleans()) else st.floats(-20, 0, width=32)
    size = sequences * depth * ranks
    values = torch.tensor(draw(st.lists(entry, min_size=size, max_size=size))).view(sequences, depth, ranks)
    log_probs = values.sort(dim=-1, descending=True).values
    candidates = torch.stack(
        [torch.randperm(50, generator=torch.Generator().manual_seed(i))[:ranks] for i in range(sequences * depth)]
    ).view(sequences, depth, ranks)
    budgets = draw(st.lists(st.integers(1, 40) | st.just(500), min_size=sequences, max_size=sequences))
    limits = draw(st.none() | st.lists(st.integers(0, depth + 1), min_size=sequences, max_size=sequences))
    return torch.arange(sequences) + 100, log_probs, candidates, budgets, limits


@settings(max_examples=60)
@given(batches())
def test_forest_is_the_most_probable_nodes(batch):
    anchors, log_probs, candidates, budgets, limits = batch
    forest = build_forest(anchors, log_probs, candidates, budgets, limits)
    assert forest.offsets[-1] == len(forest.tokens)
    expand = shared_children(log_probs, candidates)
    narrow = grow_trees(anchors, expand, log_probs.shape[1], budgets, limits, narrow=True)
    assert [tree(narrow, i) for i in range(len(budgets))] == [tree(forest, i) for i in range(len(budgets))]
    for i, budget in enumerate(budgets):
        limit = None if limits is None else limits[i]
        expected = brute_force(int(anchors[i]), log_probs[i], candidates[i], budget, limit)
        assert tree(forest, i) == expected
        one = slice(i, i + 1)
        alone = build_forest(
            anchors[one], log_probs[one], candidates[one], [budget], None if limit is None else [limit]
        )
        assert tree(alone, 0) == expected


def test_larger_tree_against_brute_force():
    torch.manual_seed(0)
    log_probs, ids = top_candidates(torch.randn(2, 5, 30) * 3, 6)
    forest = build_forest(torch.tensor([1, 2]), log_probs, ids, [64, 7])
    # Budget 64 over 6 candidates may need ranks the list lacks; both sides see the same list.
    for i, budget in enumerate([64, 7]):
        assert tree(forest, i) == brute_force(i + 1, log_probs[i], ids[i], budget)
    assert forest.offsets == [0, 64, 71]


def test_budget_one_is_plain_decoding():
    forest = build_forest(torch.tensor([7, 8]), torch.zeros(2, 3, 2), torch.zeros(2, 3, 2).long(), [1, 1])
    assert forest.tokens.tolist() == [7, 8]
    assert forest.parents.tolist() == [-1, -1]
    assert forest.offsets == [0, 1, 2]


def test_head_without_depths_gives_the_roots():
    forest = build_forest(torch.tensor([7]), torch.zeros(1, 0, 0), torch.zeros(1, 0, 0).long(), [5])
    assert forest.tokens.tolist() == [7]
    assert forest.log_probs.tolist() == [0.0]


def test_empty_batch():
    forest = build_forest(torch.zeros(0).long(), torch.zeros(0, 3, 2), torch.zeros(0, 3, 2).long(), [])
    assert forest.offsets == [0]
    assert len(forest.tokens) == 0


def test_nan_and_gaining_candidates_are_harmless():
    log_probs = torch.tensor([[[1e-6, float("nan")], [0.0, -1.0]]])
    forest = build_forest(torch.tensor([9]), log_probs, torch.tensor([[[1, 2], [3, 4]]]), [10])
    assert forest.tokens.tolist() == [9, 1, 3, 4]
    assert forest.log_probs.tolist() == [0.0, 0.0, 0.0, -1.0]


def test_children_can_depend_on_the_parent_token():
    """Token t has the children 10 t + 1 and 10 t + 2, the first one likelier the larger t is."""

    def expand(depth, tokens, parents):
        first = tokens / (tokens + 1)
        return torch.stack([first, 1 - first], dim=-1).log(), torch.stack([10 * tokens + 1, 10 * tokens + 2], dim=-1)

    forest = grow_trees(torch.tensor([1, 3]), expand, 2, [4, 4])
    assert forest.tokens[forest.rows(1)].tolist() == [3, 31, 32, 311]
    assert forest.parents[forest.rows(1)].tolist() == [-1, 0, 0, 1]
    assert forest.tokens[forest.rows(0)].tolist() == [1, 11, 12, 121]
    assert forest.parents[forest.rows(0)].tolist() == [-1, 0, 0, 2]


def test_children_can_depend_on_the_whole_path():
    """A node's children are its path, read as a number, times ten, plus 1 and 2; a state is carried from the root."""
    states = torch.zeros(1, 1, dtype=torch.int64)

    def expand(depth, tokens, parents):
        nonlocal states
        states = 10 * states.gather(1, parents) + tokens % 10
        ids = 10 * states.unsqueeze(-1) + torch.tensor([1, 2])
        return torch.tensor([0.6, 0.4]).log().expand(ids.shape), ids

    forest = grow_trees(torch.tensor([3]), expand, 4, [12])
    tokens, parents = forest.tokens.tolist(), forest.parents.tolist()
    paths = [3]
    for token, parent in zip(tokens[1:], parents[1:]):
        assert token // 10 == paths[parent]
        paths.append(10 * paths[parent] + token % 10)
    assert len(set(paths)) == 12
    assert max(forest.depths) == 4


def test_nodes_out_of_reach_are_not_expanded():
    widths = []

    def expand(depth, tokens, parents):
        widths.append(tokens.shape[1])
        log_probs = torch.tensor([0.7, 0.2, 0.1]).log().expand(*tokens.shape, 3)
        return log_probs, torch.arange(3).expand(log_probs.shape)

    wide = grow_trees(torch.tensor([1, 2]), expand, 4, [6, 4])
    narrow = grow_trees(torch.tensor([1, 2]), expand, 4, [6, 4], narrow=True)
    assert widths[:4] == [1, 3, 5, 5]
    # Below the root 0.7, 0.49, 0.343, 0.2 and one of 0.14 fit in: at depth 2 both of 0.14 still could, at 3 only 0.343.
    assert widths[4:] == [1, 3, 3, 1]
    assert [tree(narrow, i) for i in range(2)] == [tree(wide, i) for i in range(2)]


@pytest.mark.parametrize(
    ("budgets", "limits", "message"),
    [
        ([0], None, "budgets must be at least 1"),
        ([1, 2], None, r"budgets \(2\)"),
        ([1], [1, 1], r"max_depths \(2\)"),
        ([1], [-1], "max_depths must be at least 0"),
    ],
)
def test_wrong_budgets_are_refused(budgets, limits, message):
    with pytest.raises(JetSpecError, match=message):
        build_forest(torch.tensor([1]), torch.zeros(1, 1, 1), torch.zeros(1, 1, 1).long(), budgets, limits)


@settings(max_examples=60)
@given(st.data())
def test_top_candidates_against_sorting(data):
    width = data.draw(st.integers(1, 12))
    entry = st.sampled_from([-INF, -1.0, 0.0, 0.5, 2.0])
    logits = torch.tensor(data.draw(st.lists(entry, min_size=2 * width, max_size=2 * width))).view(1, 2, width)
    k = data.draw(st.integers(1, 14))
    log_probs, ids = top_candidates(logits, k)
    for row in range(2):
        expected = sorted(range(width), key=lambda token: (-logits[0, row, token].item(), token))[:k]
        assert ids[0, row].tolist() == expected
        reference = logits[0, row].log_softmax(-1)[expected]
        torch.testing.assert_close(log_probs[0, row], reference, equal_nan=True)


def test_top_candidates_breaks_bfloat16_ties_by_id():
    logits = torch.randn(3, 4, 5000, generator=torch.Generator().manual_seed(0)).bfloat16()
    log_probs, ids = top_candidates(logits, 100)
    assert log_probs.dtype == torch.float32
    assert torch.equal(ids, logits.float().sort(dim=-1, descending=True, stable=True).indices[..., :100])


def test_both_zeros_are_one_value():
    assert first_by_value(torch.tensor([[-0.0, 0.0, -1.0, -0.0, 0.0]]), 4).tolist() == [[0, 1, 3, 4]]
