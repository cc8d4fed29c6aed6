"""The row forward against transformers' own, for chunks, single rows, trees and ragged batches of them."""

from __future__ import annotations

import random

import pytest
import torch

from jetspec.models.target import Target
from tests.helpers.forest import Part, Pool, paths, plain_forward, random_ids, random_parents
from tests.helpers.layers import FAMILY_MODELS
from tests.helpers.tiny import TINY_MODELS, final_norm, tiny_gemma2, tiny_gpt_oss

MODELS = {**TINY_MODELS, "gemma2": tiny_gemma2, "gpt_oss": tiny_gpt_oss, **FAMILY_MODELS}
#: The operations of each kind of layer have tests of their own.
FAST = {*MODELS} - {*FAMILY_MODELS} | {"qwen3_next", "nemotron_h", "llama4_text"}
KINDS = [pytest.param(kind, marks=() if kind in FAST else pytest.mark.slow) for kind in sorted(MODELS)]
LAYERS = (0, 1, 2)
#: Rounding alone, of transformers' float32 against float64, takes up half of this in the tiny recurrent models.
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def models():
    """kind -> (target, a separate copy with transformers' own attention)."""

    class Models(dict):
        def __missing__(self, kind: str) -> tuple:
            self[kind] = Target.from_model(MODELS[kind](attn=None)), MODELS[kind](attn="eager")
            return self[kind]

    return Models()


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= TOLERANCE * max(1, expected.abs().max() / 4)


def assert_rows_equal_plain(pool: Pool, model, parts: list[Part]) -> None:
    """Score the parts in one batch and check every path of every part as a sequence of its own."""
    output = pool.forward(parts)
    start = 0
    for part in parts:
        context = pool.committed[part.sequence]
        rows = slice(start, start + len(part.token_ids))
        found = paths(part.parents)
        plain = plain_forward(
            model, [torch.cat([context, part.token_ids[path]]) for path in found], pool.target_layer_ids
        )
        for path, (logits, aux_hidden_states) in zip(found, plain):
            assert_close(output.logits[rows][path], logits[len(context) :])
            assert_close(output.aux_hidden_states[rows][path], aux_hidden_states[len(context) :])
        start = rows.stop


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.slow), 5, 64])
def test_prompt_chunks(models, kind, chunk):
    target, model = models[kind]
    pool, ids = Pool(target, target_layer_ids=LAYERS), random_ids(37, seed=chunk)
    [(expected_logits, expected_states)] = plain_forward(model, [ids], LAYERS)
    for start in range(0, len(ids), chunk):
        part = Part.chain(0, ids[start : start + chunk])
        output = pool.forward([part])
        assert_close(output.logits, expected_logits[start : start + chunk])
        assert_close(output.aux_hidden_states, expected_states[start : start + chunk])
        pool.commit(part, list(range(len(part.token_ids))))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("context", [0, 8, 30, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 7, 9))])
def test_random_trees(models, kind, context):
    """Contexts on both sides of the sliding window of 8; trees deep enough to cross it on their own."""
    target, model = models[kind]
    pool, rng = Pool(target, target_layer_ids=LAYERS, seed=context), random.Random(context)
    if context:
        pool.prefill(0, random_ids(context, seed=context))
    for size in (1, 2, 6, 24):
        assert_rows_equal_plain(pool, model, [Part(0, random_ids(size, seed=size), random_parents(size, rng))])
    comb = torch.tensor([-1, 0, 0, 1, 1, 3, 3, 5, 5, 7, 7, 9, 9, 11, 11, 13, 13, 15, 15, 17])  # depth 10
    assert_rows_equal_plain(pool, model, [Part(0, random_ids(len(comb), seed=5), comb)])


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_batch_of_chunks_single_rows_and_trees(models, kind):
    target, model = models[kind]
    pool, rng = Pool(target, num_sequences=5, target_layer_ids=LAYERS), random.Random(1)
    for sequence, length in enumerate([0, 5, 30, 9, 17]):
        if length:
            pool.prefill(sequence, random_ids(length, seed=sequence))
    parts = [
        Part.chain(4, random_ids(12, seed=10)),
        Part(2, random_ids(15, seed=11), random_parents(15, rng)),
        Part.chain(0, random_ids(21, seed=12)),
        Part.chain(1, random_ids(1, seed=13)),
        Part(3, random_ids(4, seed=14), random_parents(4, rng)),
    ]
    assert_rows_equal_plain(pool, model, parts)


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_after_ragged_commits_never_reads_rejected_rows(models, kind):
    """Rounds of trees in which a random path is kept; whatever was not committed is NaN before the next round."""
    target, model = models[kind]
    pool, rng = Pool(target, num_sequences=2, target_layer_ids=LAYERS), random.Random(2)
    for sequence in range(2):
        pool.prefill(sequence, random_ids(6 + sequence, seed=sequence))
    pool.poison()
    for round_index in range(5):
        parts = []
        for sequence in range(2):
            n = rng.randint(3, 10)
            parts.append(Part(sequence, random_ids(n, seed=10 * round_index + sequence), random_parents(n, rng)))
        assert_rows_equal_plain(pool, model, parts)
        for part in parts:
            path = rng.choice(paths(part.parents))
            pool.commit(part, path[: rng.randint(1, len(path))])
        pool.poison()
    assert_rows_equal_plain(pool, model, [Part.chain(1, random_ids(1, seed=99)), Part.chain(0, random_ids(2, seed=98))])


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_tap_is_the_layer_output_before_the_final_norm(models, kind):
    target, model = models[kind]
    pool, ids = Pool(target, target_layer_ids=(target.num_layers - 1, 1)), random_ids(11, seed=0)
    output = pool.forward([Part.chain(0, ids)], final_hidden=True)
    [(final, _)] = plain_forward(model, [ids])
    hidden_states = model(ids[None], output_hidden_states=True).hidden_states
    last, second = output.aux_hidden_states.split(target.hidden_size, dim=-1)
    assert_close(second, hidden_states[2][0])
    assert_close(final_norm(model)(last), hidden_states[-1][0])
    assert_close(output.hidden, hidden_states[-1][0])
    assert not torch.allclose(last, hidden_states[-1][0], atol=1e-2)
    assert_close(output.logits, final)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_chosen_rows_only(models, kind):
    target, _ = models[kind]
    part = Part.chain(0, random_ids(9, seed=1))
    every = Pool(target).forward([part])
    some = Pool(target, target_layer_ids=LAYERS).forward([part], logits_rows=torch.tensor([7, 0, 7]))
    none = Pool(target, target_layer_ids=LAYERS).forward([part], logits_rows=torch.tensor([], dtype=torch.int64))
    assert_close(some.logits, every.logits[[7, 0, 7]])
    assert none.logits.shape == (0, target.vocab_size)
    assert torch.equal(none.aux_hidden_states, some.aux_hidden_states)
    assert every.aux_hidden_states is None
    assert every.hidden is None
