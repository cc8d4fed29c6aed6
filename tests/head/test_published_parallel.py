"""DFlash, Domino, DSpark and DFlash 2 heads in every layout: what they draft, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from jetspec.head import load_head, save_head
from tests.helpers.drafted import check_drafts, published_rounds
from tests.helpers.published_heads import REDUCED, dflash

DOMINO = {"dflash_config__shift_label": False, "dflash_config__pure_draft_prefix_len": 0}
SCALES = {
    "dflash_config__output_multiplier": 0.5,
    "dflash_config__final_logit_softcapping": 3.0,
    "dflash_config__input_embedding_scale": 2.0,
}
HEADS = {
    "DFlash / DFlash": lambda: dflash("DFlash"),
    "DFlash / Domino": lambda: dflash("DFlash", "Domino", 1),
    "DFlash / Domino, rows from the first mask on": lambda: dflash("DFlash", "Domino", 2, **DOMINO),
    "DFlash / DSpark": lambda: dflash("DFlash", "DSpark", 3),
    "DFlash / DSpark, gated": lambda: dflash("DFlash", "DSpark", 4, dflash_config__markov_head_type="gated"),
    "DFlash / DSpark, recurrent": lambda: dflash("DFlash", "DSpark", 5, dflash_config__markov_head_type="rnn"),
    "DFlash / DFlash 2": lambda: dflash("DFlash", "DFlash 2", 6),
    "DFlash / DFlash 2, scaled": lambda: dflash("DFlash", "DFlash 2", 7, **SCALES),
    "DFlash / DSpark, of DeepSpec": lambda: dflash("DeepSpec", "DSpark", 8),
    "speculators / DFlash": lambda: dflash("speculators", "DFlash", 9),
    "speculators / DFlash, few tokens": lambda: dflash("speculators", "DFlash", 10, size=REDUCED),
    "speculators / DSpark": lambda: dflash("speculators", "DSpark", 11, size=REDUCED),
    "speculators / DSpark, recurrent": lambda: dflash("speculators", "DSpark", 12, markov_head_type="rnn"),
    "speculators / DFlash 2": lambda: dflash("speculators", "DFlash 2", 13),
}


@pytest.mark.parametrize("name", HEADS)
def test_trees_are_those_of_the_publishers_head(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # All tokens are candidates, so that the reference need not choose any.
    monkeypatch.setattr("jetspec.head.path_children.CANDIDATES", 128)
    published = HEADS[name]()
    head = load_head(published.write(tmp_path / "head"))
    layout, _, family = name.partition(",")[0].partition(" / ")
    assert (head.layout, head.config.family) == (layout, family)
    check_drafts(published, published_rounds(head))
    save_head(head, tmp_path / "again")
    again = load_head(tmp_path / "again")
    assert again.config.replace(num_target_layers=None) == head.config.replace(num_target_layers=None)
    assert {n: t.tolist() for n, t in again.state_dict().items()} == {n: t.tolist() for n, t in head.state_dict().items()}
