"""Tiny models and data sets that a benchmark runs on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jetspec.head import head_for_target, save_head
from tests.helpers.tiny import TEXT_VOCAB_SIZE, tiny_llama, tiny_target, tiny_tokenizer

ROWS: dict[str, list[dict[str, Any]]] = {
    "gsm8k_test.jsonl": [
        {"question": f"{n} hens and {n} ducks?", "answer": f"Sum: <<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n}"}
        for n in range(3, 8)
    ],
    "math500.jsonl": [{"problem": "What is $1+1$?", "solution": "It is $\\boxed{2}.$\n#### 2"}],
    "humaneval.jsonl": [
        {
            "task_id": "HumanEval/0",
            "prompt": "import math\n\n\ndef root(x):\n    '''The root.'''\n",
            "entry_point": "root",
            "test": "def check(candidate):\n    assert candidate(9) == 3\n",
        }
    ],
    "mt_bench.jsonl": [
        {"question_id": 81 + n, "category": name, "turns": [f"Say {name}.", "Again."]}
        for n, name in enumerate(("writing", "roleplay", "math"))
    ],
}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Local copies of the four data sets, a few rows each."""
    folder = tmp_path_factory.mktemp("data")
    for name, rows in ROWS.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths of a saved target and of what each option takes."""
    folder = tmp_path_factory.mktemp("models")
    tiny_llama(vocab_size=TEXT_VOCAB_SIZE, max_position_embeddings=512).save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    target = tiny_target("llama", text=True, max_position_embeddings=512)
    sizes: dict[str, Any] = {"num_layers": 1, "block_size": 5, "num_aux_layers": 2}
    mask = TEXT_VOCAB_SIZE - 1
    save_head(head_for_target(target, mask_token_id=mask, **sizes), folder / "draft")
    save_head(head_for_target(target, mask_token_id=mask, causal=False, **sizes), folder / "dflash")
    save_head(head_for_target(target, kind="autoregressive", **sizes), folder / "eagle")
    names = {name: str(folder / name) for name in ("target", "draft", "dflash", "eagle")}
    return {**names, "draft_model": names["target"]}
