"""A tiny target and head in a directory, for every command."""

from __future__ import annotations

from pathlib import Path

import pytest

from jetspec.head import head_for_target, save_head
from tests.bench.conftest import data, models  # noqa: F401  fixtures of the tests of `jetspec bench`
from tests.helpers.tiny import TEXT_VOCAB_SIZE, tiny_llama, tiny_target, tiny_tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`target` and `head`, saved."""
    folder = tmp_path_factory.mktemp("models")
    tiny_llama(vocab_size=TEXT_VOCAB_SIZE, max_position_embeddings=512).save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    target = tiny_target("llama", text=True, max_position_embeddings=512)
    head = head_for_target(target, num_layers=1, block_size=4, num_aux_layers=2, mask_token_id=TEXT_VOCAB_SIZE - 1)
    save_head(head, folder / "head")
    return folder


@pytest.fixture(scope="session")
def unflagged(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same head, with nothing in its configuration that says whether its blocks are causal."""
    import json
    import shutil

    copy = tmp_path_factory.mktemp("unflagged") / "head"
    shutil.copytree(folder / "head", copy)
    config = json.loads((copy / "config.json").read_text())
    del config["is_causal"]
    for name in ("causal", "causal_head"):
        del config["dflash_config"][name]
    (copy / "config.json").write_text(json.dumps(config))
    return copy
