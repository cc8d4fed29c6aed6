"""Values that are not finite: they spoil the drafts that see them and no others, and are reported once."""

from __future__ import annotations

import logging

import pytest
import torch

from jetspec.head import DraftHead, load_head, save_head
from tests.helpers.tiny_head import WINDOWED, random_aux_hidden_states, tiny_head

ALL_WINDOWED = {"sliding_window": 4, "layer_types": ("sliding_attention",) * 2}
AUTOREGRESSIVE = {"kind": "autoregressive", "mask_token_id": None}
KINDS = [
    pytest.param({}, id="causal"),
    pytest.param({"causal": False}, id="bidirectional"),
    pytest.param(WINDOWED, id="windowed"),
    pytest.param({"transition_size": 8}, id="transition"),
    pytest.param(AUTOREGRESSIVE, id="autoregressive"),
    pytest.param({**AUTOREGRESSIVE, **WINDOWED}, id="autoregressive-windowed"),
]
ANCHORS = torch.tensor([4, 11, 4, 8])
LENGTH = 18


class Text:
    """A text behind whose anchors a head drafts; every token has an embedding of its own."""

    def __init__(self, head: DraftHead) -> None:
        generator = torch.Generator().manual_seed(0)
        self.head = head
        self.states = random_aux_hidden_states(head, 12, generator)
        self.table = torch.randn(64, 32, generator=generator)
        self.token_ids = torch.arange(LENGTH)

    def drafts(self) -> torch.Tensor:
        return self.head.forward_text(self.states, self.token_ids, ANCHORS, lambda ids: self.table[ids])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("position", [5, 8, 11])
def test_a_state_spoils_only_the_blocks_behind_it(kind, value, position):
    text = Text(tiny_head(1, **kind))
    clean = text.drafts()
    text.states[position, 3] = value
    spoiled = text.drafts()
    for block, anchor in enumerate(ANCHORS.tolist()):
        if position >= anchor:
            assert torch.equal(spoiled[block], clean[block]), block
        else:
            assert not spoiled[block].isfinite().any(), block


@pytest.mark.parametrize("kind", [{}, AUTOREGRESSIVE])
def test_a_state_that_no_window_reaches_spoils_nothing(kind):
    text = Text(tiny_head(2, **kind, **ALL_WINDOWED))
    clean = text.drafts()
    text.states[0] = float("nan")
    spoiled = text.drafts()
    assert torch.equal(spoiled[1], clean[1])
    assert spoiled[0].isfinite().all() == (kind == {})  # two autoregressive layers reach twice as far


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("token", [6, 9, 13])
def test_an_embedding_spoils_only_the_drafts_that_see_its_token(kind, token):
    text = Text(tiny_head(3, **kind))
    clean = text.drafts()
    text.table[token] = float("nan")
    spoiled = text.drafts()
    is_autoregressive = text.head.config.kind == "autoregressive"
    reads_path = is_autoregressive or text.head.transition is not None
    for block, anchor in enumerate(ANCHORS.tolist()):
        if not is_autoregressive and anchor != token and not (reads_path and anchor <= token < anchor + 4):
            assert torch.equal(spoiled[block], clean[block]), block
        elif token >= anchor:
            # The draft at depth d is made from the tokens up to anchor + d - 1.
            unseen = token - anchor if reads_path else 0
            assert torch.equal(spoiled[block, :unseen], clean[block, :unseen]), block
            assert not spoiled[block, unseen:].isfinite().any(), block


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_stay_finite_where_no_block_sees_the_value(kind):
    head = tiny_head(4, **kind)
    text = Text(head)
    text.states[11] = float("nan")
    text.drafts().square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in head.parameters())


@pytest.mark.parametrize(
    ("own", "wanted", "scale", "loaded"),
    [
        (torch.bfloat16, torch.float16, 1.0, torch.bfloat16),
        (torch.bfloat16, torch.float32, 1.0, torch.float32),
        (torch.float32, torch.float16, 1.0, torch.float16),
        (torch.float32, torch.float16, 1e6, torch.float32),
        (torch.float32, torch.bfloat16, 1e6, torch.bfloat16),
        (torch.float16, torch.bfloat16, 1.0, torch.bfloat16),
        (torch.float16, torch.float32, 1.0, torch.float32),
    ],
)
def test_a_head_keeps_its_type_where_the_wanted_one_overflows(tmp_path, caplog, own, wanted, scale, loaded):
    head = tiny_head(5)
    with torch.no_grad():
        head.layers[0].mlp.down_proj.weight.mul_(scale)
    save_head(head, tmp_path, dtype=own)
    with caplog.at_level(logging.WARNING, "jetspec"):
        assert load_head(tmp_path, dtype=wanted).dtype == loaded
    assert len(caplog.records) == (loaded != wanted)
    assert load_head(tmp_path).dtype == own
