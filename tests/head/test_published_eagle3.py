"""EAGLE-3 heads in the layouts of the original repository, SpecForge and speculators: what they draft, what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from jetspec.errors import JetSpecError
from jetspec.head import load_head, save_head
from tests.helpers.drafted import check_drafts, published_rounds
from tests.helpers.published_heads import HIDDEN, VOCAB, Published, eagle3, published_target

QWEN3 = {"transformer_layer_config__model_type": "qwen3"}
HEADS = {
    "EAGLE": lambda: eagle3("EAGLE"),
    "EAGLE, all tokens": lambda: eagle3("EAGLE", size=VOCAB),
    "SpecForge": lambda: eagle3("SpecForge", 1),
    "SpecForge, norms": lambda: eagle3("SpecForge", 2, fc_norm=True, norm_output=True),
    "SpecForge, layers": lambda: eagle3(
        "SpecForge", 3, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 5], "use_aux_hidden_state": True}
    ),
    "speculators": lambda: eagle3("speculators", 4),
    "speculators, Qwen3": lambda: eagle3("speculators", 5, **QWEN3, eagle_aux_hidden_state_layer_ids=[1, 5, 7]),
    "speculators, layers": lambda: eagle3("speculators", 6, layers=2, norm_before_residual=True),
    "speculators, norms": lambda: eagle3("speculators", 7, fc_norm=True, norm_output=True),
    "speculators, joint norm": lambda: eagle3("speculators", 8, norm_before_fc=True, **QWEN3, layers=2),
}


@pytest.mark.parametrize("name", HEADS)
def test_trees_are_those_of_the_publishers_head(name: str, tmp_path: Path) -> None:
    published = HEADS[name]()
    folder = published.write(tmp_path / "head")
    head = load_head(folder)
    assert (head.config.family, head.layout) == ("EAGLE-3", name.partition(",")[0])
    check_drafts(published, published_rounds(head))
    # Written anew, it is in speculators' layout.
    save_head(head, tmp_path / "again")
    again = load_head(tmp_path / "again")
    assert again.config.replace(block_size=head.config.block_size) == head.config
    assert {n: t.tolist() for n, t in again.state_dict().items()} == {n: t.tolist() for n, t in head.state_dict().items()}
