"""Rows that are not finite: no row that must not see them changes, in any kind of batch and any layer type."""

from __future__ import annotations

import pytest
import torch

from jetspec.models.target import Target
from tests.helpers.forest import Part, Pool, random_ids
from tests.helpers.tiny import tiny_gemma2, tiny_gemma3, tiny_gpt_oss, tiny_llama, tiny_qwen3, tiny_qwen3_moe

MODELS = {
    "llama": tiny_llama,
    "qwen3": tiny_qwen3,
    "qwen3_moe": tiny_qwen3_moe,
    "gemma2": tiny_gemma2,
    "gemma3": tiny_gemma3,
    "gpt_oss": tiny_gpt_oss,
}
SPOILED = 127
LAYERS = (0, 3)
# Rows of a tree; row 2 and its descendants 4 and 5 are to be spoiled.
PARENTS = torch.tensor([-1, 0, 0, 1, 2, 4, 3])


def target_with_a_spoiled_token(kind: str, value: float, **settings: object) -> Target:
    model = MODELS[kind](**settings, tie_word_embeddings=False)
    model.get_input_embeddings().weight[SPOILED] = value
    return Target.from_model(model)


def ancestors_and_self(parents: torch.Tensor, row: int) -> list[int]:
    found = []
    while row >= 0:
        found.append(row)
        row = int(parents[row])
    return found


def check(target: Target, parents: torch.Tensor, spoiled_row: int, context: int = 11, beside: int = 3) -> None:
    """Score a tree with and without a spoiled row, beside a chain of another sequence, of `beside` rows."""
    ids = random_ids(len(parents), seed=3) % SPOILED
    others = [Part.chain(1, random_ids(beside, seed=4) % SPOILED)] if beside else []
    outputs, pools = [], []
    for last in (int(ids[spoiled_row]), SPOILED):
        pool = Pool(target, 2, target_layer_ids=LAYERS)
        pool.prefill(0, random_ids(context, seed=5) % SPOILED)
        tree = ids.clone()
        tree[spoiled_row] = last
        outputs.append(pool.forward([Part(0, tree, parents), *others], final_hidden=True))
        pools.append(pool)
    clean = [row for row in range(len(parents)) if spoiled_row not in ancestors_and_self(parents, row)]
    rows = [*clean, *range(len(parents), len(parents) + beside)]
    for expected, got in zip(*outputs, strict=True):
        torch.testing.assert_close(got[rows], expected[rows], atol=1e-5, rtol=1e-5)
    lost = [row for row in range(len(parents)) if row not in clean]
    assert not outputs[1].logits[lost].isfinite().any(dim=-1).any()
    # What is committed of the clean rows serves later rows, and other sequences.
    slots = pools[0].tables[0][: context + len(parents)][context:][clean]
    for expected, got in zip(pools[0].cache.keys + pools[0].cache.values, pools[1].cache.keys + pools[1].cache.values):
        torch.testing.assert_close(got[slots], expected[slots], atol=1e-5, rtol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("kind", sorted(MODELS))
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_spoiled_row_reaches_its_descendants_alone(kind, value):
    check(target_with_a_spoiled_token(kind, value), PARENTS, 2)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt_oss"])
def test_a_spoiled_prompt_token_reaches_none_before_it(kind):
    check(target_with_a_spoiled_token(kind, float("nan")), torch.arange(-1, 19), 12, context=3)


@torch.inference_mode()
@pytest.mark.parametrize("parents", [PARENTS, torch.arange(-1, 6)])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("beside", [0, 3])
def test_batch_invariant_targets_keep_spoiled_rows_apart(kind, parents, beside):
    target = target_with_a_spoiled_token(kind, 0.0)
    invariant = target.as_batch_invariant()
    target.model.get_input_embeddings().weight[SPOILED] = float("nan")
    check(invariant, parents, 2, beside=beside)


@torch.inference_mode()
def test_finite_rows_are_scored_once():
    target, calls = target_with_a_spoiled_token("llama", float("nan")), []
    target.model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    for last, forwards in ((3, 1), (SPOILED, 2)):
        calls.clear()
        Pool(target).forward([Part.chain(0, torch.tensor([5, last]))])
        assert len(calls) == forwards
    calls.clear()
    Pool(target).forward([Part.chain(0, torch.tensor([SPOILED]))])  # no row beside it to spoil
    assert len(calls) == 1
