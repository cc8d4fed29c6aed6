"""Branch conditioning: one step at a time equals all at once, and trees hold the children their paths call for."""

from __future__ import annotations

import pytest
import torch

from jetspec.head import DraftHead, HeadConfig, head_for_target, load_head, save_head
from jetspec.head.transition import TransitionChildren
from jetspec.models.target import Target
from jetspec.tree import grow_trees
from tests.helpers.tiny import VOCAB_SIZE, tiny_target


def conditioned_head(target: Target, seed: int = 0, **options: object) -> DraftHead:
    """A head whose transition says something: a fresh one's output is zero."""
    settings = {
        "num_layers": 1,
        "block_size": 5,
        "num_aux_layers": 2,
        "mask_token_id": VOCAB_SIZE - 1,
        "transition_size": 6,
    }
    head = head_for_target(target, seed=seed, **{**settings, **options})
    assert head.transition is not None
    generator = torch.Generator().manual_seed(seed)
    torch.nn.init.normal_(head.transition.out_proj.weight, std=4.0, generator=generator)
    return head.eval()


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@torch.no_grad()
def test_a_fresh_transition_shifts_nothing(target: Target) -> None:
    head = head_for_target(
        target, num_layers=1, block_size=5, num_aux_layers=2, mask_token_id=1, transition_size=6, init="target"
    )
    shift, _ = head.transition(target.embed(torch.tensor([[1, 2, 3]])))
    assert not shift.any()


@torch.no_grad()
def test_steps_equal_the_whole_path(target: Target) -> None:
    transition = conditioned_head(target).transition
    embeds = target.embed(torch.randint(VOCAB_SIZE, (3, 4), generator=torch.Generator().manual_seed(1)))
    whole, last = transition(embeds)
    state, steps = None, []
    for depth in range(4):
        shift, state = transition(embeds[:, depth : depth + 1], state)
        steps.append(shift)
    torch.testing.assert_close(torch.cat(steps, dim=1), whole)
    torch.testing.assert_close(state, last)


@torch.no_grad()
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_children_are_those_of_their_path(target: Target, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against every node's own softmax, had from its whole path at once."""
    monkeypatch.setattr("jetspec.head.path_children.CANDIDATES", VOCAB_SIZE)
    transition = conditioned_head(target).transition
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(2, 4, target.hidden_size, generator=generator)
    anchors = torch.tensor([3, 4])
    logits = target.lm_head(hidden) / temperature
    scale = torch.full((2,), 1 / temperature)
    forest = grow_trees(anchors, TransitionChildren(transition, target, logits, scale), 4, [40, 25])
    shifted_choices = 0
    for tree in range(2):
        rows = forest.rows(tree)
        tokens, parents = forest.tokens[rows].tolist(), forest.parents[rows].tolist()
        log_probs = forest.log_probs[rows].tolist()
        paths = [[anchors[tree].item()]]
        for node in range(1, len(tokens)):
            path = paths[parents[node]]
            depth = len(path)
            shift, _ = transition(target.embed(torch.tensor([path])))
            expected = (target.lm_head(hidden[tree, depth - 1] + shift[0, -1]) / temperature).log_softmax(-1)
            assert log_probs[node] - log_probs[parents[node]] == pytest.approx(expected[tokens[node]].item(), abs=1e-4)
            shifted_choices += tokens[node] != logits[tree, depth - 1].argmax()
            paths.append([*path, tokens[node]])
        probabilities = sorted(log_probs, reverse=True)
        assert len(tokens) == [40, 25][tree]
        assert probabilities[0] == 0
    assert shifted_choices > 10


@torch.no_grad()
def test_probability_outside_the_candidates_is_kept(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jetspec.head.path_children.CANDIDATES", 5)
    transition = conditioned_head(target).transition
    torch.nn.init.zeros_(transition.out_proj.weight)
    logits = torch.randn(1, 2, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    children = TransitionChildren(transition, target, logits, torch.ones(1))
    log_probs, ids = children(1, torch.tensor([[7]]), torch.tensor([[0]]))
    expected, order = logits[0, 0].log_softmax(-1).topk(5)
    assert ids[0, 0].tolist() == order.tolist()
    torch.testing.assert_close(log_probs[0, 0], expected)


def test_it_is_saved_with_the_head(target: Target, tmp_path) -> None:
    head = conditioned_head(target)
    save_head(head, tmp_path)
    again = load_head(tmp_path)
    assert again.config == head.config
    assert again.config.transition_size == 6
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_heads_without_it_say_nothing_of_it(target: Target) -> None:
    plain = conditioned_head(target).config.to_dict()
    del plain["dflash_config"]["transition_size"]
    config = HeadConfig.from_dict(plain)
    assert config.transition_size == 0
    assert "transition_size" not in config.to_dict()["dflash_config"]
