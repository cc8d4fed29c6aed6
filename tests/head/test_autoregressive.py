"""The autoregressive head: entries, levels and training against a slow reference that recomputes every path."""

from __future__ import annotations

import json

import pytest
import torch

from jetspec.attention import RowBatch
from jetspec.errors import JetSpecError
from jetspec.head import AutoregressiveHead, HeadConfig, head_for_target, load_head, save_head
from jetspec.head.autoregressive import Paths
from tests.helpers.reference_head import reference_path
from tests.helpers.tiny import tiny_target
from tests.helpers.tiny_head import WINDOWED, random_aux_hidden_states, tiny_head

VOCAB = 64
KINDS = [
    pytest.param({"num_hidden_layers": 1}, id="one layer"),
    pytest.param({"num_hidden_layers": 2}, id="two layers"),
    pytest.param(WINDOWED, id="windowed"),
]


def autoregressive_head(seed: int = 0, **settings: object) -> AutoregressiveHead:
    head = tiny_head(seed, **{"kind": "autoregressive", "mask_token_id": None, **settings})
    assert isinstance(head, AutoregressiveHead)
    return head


def embedding(seed: int = 0) -> torch.Tensor:
    return torch.randn(VOCAB, 32, generator=torch.Generator().manual_seed(seed))


class Text:
    """A text whose tokens are committed a few at a time, with entries in shuffled blocks of 4 slots."""

    def __init__(self, head: AutoregressiveHead, slots: torch.Tensor, generator: torch.Generator) -> None:
        self.tokens = torch.randint(VOCAB, (40,), generator=generator)
        self.aux_hidden_states = random_aux_hidden_states(head, 40, generator)
        self.slots = slots
        self.committed = 0

    @property
    def anchor(self) -> int:
        return self.committed


class Simulation:
    """Commits and drafts of several texts at once, through one cache."""

    def __init__(self, head: AutoregressiveHead, texts: int, seed: int) -> None:
        self.head, self.embedding = head, embedding(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.cache = head.new_cache(num_blocks=10 * texts, block_size=4)
        blocks = torch.randperm(10 * texts, generator=self.generator).view(texts, 10)
        slots = (blocks[:, :, None] * 4 + torch.arange(4)).flatten(1)
        self.texts = [Text(head, own, self.generator) for own in slots]

    def commit(self, counts: list[int]) -> None:
        """Entry j lies in the slot of token j + 1."""
        spans = []
        for text, count in zip(self.texts, counts, strict=True):
            first = max(text.committed, 1)
            text.committed += count
            if text.committed > first:
                spans.append((text, first, text.committed))
        if spans:
            features = self.head.features(torch.cat([text.aux_hidden_states[a - 1 : b - 1] for text, a, b in spans]))
            tokens = [text.tokens[a:b] for text, a, b in spans]
            batch = RowBatch.chains(tokens, [text.slots[1:b] for text, _, b in spans])
            self.head.extend(features, self.embedding[batch.token_ids], batch, self.cache)

    def draft(self, widths: list[int]) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Random trees; for each level the tokens [S, W], the parents [S, W] and the predictions [S, W, hidden]."""
        roots = torch.tensor([text.anchor - 1 for text in self.texts])
        slots = [text.slots[1 : text.committed] for text in self.texts]
        contexts = [torch.arange(root) for root in roots.tolist()]
        paths = Paths(roots[:, None], contexts, lambda layer, s: self.cache.read(layer, slots[s]))
        hidden = self.head.features(
            torch.stack([text.aux_hidden_states[text.committed - 1] for text in self.texts])
        ).unsqueeze(1)
        levels = []
        for depth, width in enumerate(widths):
            shape = (len(self.texts), width)
            parents = torch.randint(hidden.shape[1], shape, generator=self.generator)
            tokens = torch.randint(VOCAB, shape, generator=self.generator)
            if depth == 0:
                tokens = torch.stack([text.tokens[text.anchor] for text in self.texts])[:, None]
            features = torch.stack([own[p] for own, p in zip(hidden, parents)])
            hidden = self.head.forward_level(features, self.embedding[tokens], paths, parents)
            levels.append((tokens, parents, self.head.norm(hidden)))
        return levels

    def check(self, widths: list[int]) -> None:
        levels = self.draft(widths)
        for s, text in enumerate(self.texts):
            drafted = [[[]]]  # for each node of each level, the tokens behind the anchor
            for tokens, parents, _ in levels[1:]:
                drafted.append([[*drafted[-1][p], t] for t, p in zip(tokens[s].tolist(), parents[s].tolist())])
            for (_, _, hidden), nodes in zip(levels, drafted, strict=True):
                for got, path in zip(hidden[s], nodes, strict=True):
                    tokens = torch.cat((text.tokens[: text.anchor + 1], torch.tensor(path, dtype=torch.int64)))
                    expected = reference_path(
                        self.head.config,
                        self.head.state_dict(),
                        text.aux_hidden_states[: text.committed],
                        self.embedding[tokens],
                    )
                    torch.testing.assert_close(got, expected[-1], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
def test_trees_equal_the_reference_after_ragged_partial_acceptance(kind: dict) -> None:
    simulation = Simulation(autoregressive_head(1, **kind), texts=3, seed=1)
    simulation.commit([1, 6, 3])
    simulation.check([1, 3, 2])
    simulation.commit([1, 0, 4])
    simulation.commit([3, 2, 0])
    simulation.check([1, 1, 3, 2])


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
def test_training_equals_the_reference(kind: dict) -> None:
    head, table = autoregressive_head(2, **kind), embedding()
    generator = torch.Generator().manual_seed(2)
    tokens, aux_hidden_states = (
        torch.randint(VOCAB, (12,), generator=generator),
        random_aux_hidden_states(head, 11, generator),
    )
    anchors = [1, 2, 5, 8, 10]
    hidden = head.forward_text(aux_hidden_states, tokens, torch.tensor(anchors), lambda ids: table[ids])
    assert hidden.shape == (5, 4, 32)
    assert hidden.isfinite().all()
    for anchor, drafted in zip(anchors, hidden):
        known = table[tokens[: anchor + 4]]
        expected = reference_path(head.config, head.state_dict(), aux_hidden_states[:anchor], known)
        torch.testing.assert_close(drafted[: len(expected)], expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_token_alone_anchors_no_context(kind: dict) -> None:
    """Anchor 1 has no entry before its own; with no other block there is none at all."""
    head, table = autoregressive_head(3, **kind), embedding()
    generator = torch.Generator().manual_seed(3)
    tokens, aux_hidden_states = (
        torch.randint(VOCAB, (9,), generator=generator),
        random_aux_hidden_states(head, 1, generator),
    )
    [hidden] = head.forward_text(aux_hidden_states, tokens, torch.tensor([1]), lambda ids: table[ids])
    expected = reference_path(head.config, head.state_dict(), aux_hidden_states, table[tokens[:5]])
    torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=1e-4)


def gradient_of(head: AutoregressiveHead, anchors: list[int], block: int, depth: int) -> list[list[bool]]:
    """Which aux_hidden_states and which tokens' embeddings the prediction at one depth of one block depends on."""
    generator = torch.Generator().manual_seed(4)
    aux_hidden_states = random_aux_hidden_states(head, 11, generator).requires_grad_()
    table = torch.randn(12, 32, generator=generator, requires_grad=True)  # token t of the text is t
    hidden = head.forward_text(aux_hidden_states, torch.arange(12), torch.tensor(anchors), lambda ids: table[ids])
    hidden[block, depth - 1].square().sum().backward()
    return [(x.grad.abs().sum(1) > 0).tolist() for x in (aux_hidden_states, table)]


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(("block", "depth"), [(0, 1), (1, 1), (1, 3), (2, 4)])
def test_a_draft_depends_on_states_before_its_anchor_and_tokens_before_the_predicted_one(
    layers: int, block: int, depth: int
) -> None:
    anchors = [3, 4, 7]
    aux_hidden_states, tokens = gradient_of(autoregressive_head(4, num_hidden_layers=layers), anchors, block, depth)
    assert aux_hidden_states == [row < anchors[block] for row in range(11)]
    # Token 0 has no entry; token anchor + depth is predicted.
    assert tokens == [0 < t < anchors[block] + depth for t in range(12)]


def test_every_parameter_gets_a_gradient() -> None:
    head, table = autoregressive_head(5), embedding()
    generator = torch.Generator().manual_seed(5)
    aux_hidden_states, tokens = (
        random_aux_hidden_states(head, 9, generator),
        torch.randint(VOCAB, (12,), generator=generator),
    )
    hidden = head.forward_text(aux_hidden_states, tokens, torch.tensor([4, 9]), lambda ids: table[ids])
    (hidden * torch.randn(hidden.shape, generator=generator)).sum().backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_it_reloads_as_what_it_is(tmp_path) -> None:
    head, table = autoregressive_head(6), embedding()
    save_head(head, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["AutoregressiveDraftModel"]
    loaded = load_head(tmp_path)
    assert isinstance(loaded, AutoregressiveHead)
    assert loaded.config == head.config
    generator = torch.Generator().manual_seed(6)
    aux_hidden_states, tokens = (
        random_aux_hidden_states(head, 6, generator),
        torch.randint(VOCAB, (9,), generator=generator),
    )
    outputs = [
        h.forward_text(aux_hidden_states, tokens, torch.tensor([3, 6]), lambda ids: table[ids]) for h in (head, loaded)
    ]
    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask_token_id": 5}, "mask_token_id=5"),
        ({"transition_size": 4}, "transition_size=4"),
        ({"shifted": True}, "shifted=True"),
    ],
)
def test_what_only_a_parallel_head_has_is_refused(change: dict, message: str) -> None:
    config = autoregressive_head().config.to_dict()
    config["dflash_config"] |= change
    with pytest.raises(JetSpecError, match=message):
        HeadConfig.from_dict(config)
    with pytest.raises(JetSpecError, match="kind='eagle'"):
        autoregressive_head(kind="eagle")


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_fresh_head_fits_its_target(kind: str) -> None:
    target = tiny_target(kind)
    head = head_for_target(target, kind="autoregressive", num_layers=1, block_size=4, num_aux_layers=2)
    assert isinstance(head, AutoregressiveHead)
    aux_hidden_states = torch.randn(5, 96, generator=torch.Generator().manual_seed(7))
    assert head.forward_text(aux_hidden_states, torch.arange(9), torch.tensor([2, 5]), target.embed).isfinite().all()


def test_a_head_started_from_its_target_reads_the_last_aux_hidden_state() -> None:
    target = tiny_target()
    head = head_for_target(target, kind="autoregressive", num_layers=1, block_size=4, num_aux_layers=2, init="target")
    aux_hidden_states = torch.randn(5, 96, generator=torch.Generator().manual_seed(7))
    assert torch.equal(head.features(aux_hidden_states), aux_hidden_states[:, 48:])
    entries = head._entries(head.features(aux_hidden_states), torch.zeros(5, 48))
    torch.testing.assert_close(entries, head.hidden_norm(aux_hidden_states[:, 48:]))
